// Requests to the server that this page came from, over OpenAI's API. Addresses are relative, so that the page also works
// below a path of a reverse proxy.

import { sha256 } from "./digest.js";
import { keep, recall } from "./storage.js";

const KEY = "paceline.key";
const PAGE = 100; // objects of a list that are asked for at once

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status; // 0: no answer came
    this.code = code;
  }
}

// ---- the key --------------------------------------------------------------------------------------------------------
let used = null; // by this page to its end, whatever other tabs keep meanwhile
let taken = false; // the server has answered to it

function savedKey() {
  return (used ??= recall(KEY, "sessionStorage") ?? recall(KEY) ?? "");
}

/** lasting: also when the browser is closed. False: the page begins anew, since all that is under way in it is another key's. */
export function saveKey(key, lasting) {
  keep(KEY, lasting ? null : key, "sessionStorage");
  keep(KEY, lasting ? key : null);
  if (taken && key !== savedKey()) {
    location.reload();
    return false;
  }
  used = key;
  return true;
}

/** A name for the key in use that does not tell it; empty where there is none. */
export function keyName() {
  return savedKey() && sha256(`paceline conversations ${savedKey()}`).slice(0, 32);
}

function headers(more = {}, key = savedKey()) {
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

function address(path) {
  return new URL(path, document.baseURI).href;
}

// ---- requests -------------------------------------------------------------------------------------------------------
/** The JSON of an answer. key: to be tried, in place of the one in use. Raises ApiError with the server's own sentence. */
export async function request(path, { method = "GET", body, signal, key } = {}) {
  const answer = await send(path, { method, body, signal, key });
  return parsed(answer.status, await answer.text());
}

/** The text at a path. Raises ApiError. */
export async function requestText(path) {
  const answer = await send(path, { method: "GET" });
  if (answer.headers.get("content-type")?.includes("html")) throw foreign(answer.status);
  return answer.text();
}

/** All objects of a list, however many answers they take. */
export async function requestAll(path, query = "") {
  const found = [];
  for (let after = query && `&${query}`; ; ) {
    const { data, has_more: more, last_id: last } = await request(`${path}?limit=${PAGE}${after}`);
    found.push(...data);
    if (!more || !data.length) return found;
    after = `${query && `&${query}`}&after=${encodeURIComponent(last)}`;
  }
}

function parsed(status, text) {
  try {
    return JSON.parse(text);
  } catch {
    throw foreign(status);
  }
}

function foreign(status) {
  return new ApiError(`What answered is not the server, but perhaps a proxy in front of it (status ${status}).`);
}

/** What is to be deleted is not there, or not any more. Raises any other ApiError. */
export function gone(error) {
  if (error.status !== 404) throw error;
}

/** The same request may be answered later: nobody has answered, or with such a status. */
export function passing({ status = 0 }) {
  return [0, 429, 502, 503, 504].includes(status);
}

/** A text that was pasted may hold half of a character, which no request may. */
function wellFormed(_, value) {
  return typeof value === "string" ? value.toWellFormed() : value;
}

async function send(path, { method, body, signal, key }) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body, wellFormed) };
  const kind = body === undefined ? {} : { "content-type": "application/json" };
  const named = headers(kind, key);
  if (/[^\x20-\xff]/.test(named.authorization)) { // no header may hold it
    throw new ApiError("Incorrect API key: it has a character that no key has. Copy it again, whole.", 401);
  }
  let answer;
  try {
    answer = await fetch(address(path), { method, headers: named, signal, ...sent, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (!answer.ok) throw failure(answer.status, await answer.text());
  taken ||= key === undefined && path.startsWith("v1/");
  return answer;
}

function failure(status, text) {
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    // a proxy in front answered, not the server
  }
  return new ApiError(error?.message ?? `The server answered ${status}, without a reason.`, status, error?.code ?? null);
}

/** The events of a response that begins now. Raises ApiError, also in the middle; AbortError when it was stopped. */
export async function* begin(body, signal) {
  yield* events(await send("v1/responses", { method: "POST", body, signal }));
}

/** The events of a response after this one, those to come included; -1: all. */
export async function* resume(id, after, signal) {
  yield* events(await send(`v1/responses/${id}?stream=true${after < 0 ? "" : `&starting_after=${after}`}`, { method: "GET", signal }));
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // an event's name, a comment, or its end
        const event = JSON.parse(line.slice(5));
        if (event.type === "error") throw new ApiError(event.message ?? "The answer could not be finished.", 500);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection was cut in mid-answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Upload one file. onProgress: called with the part that has left, 0 to 1. XMLHttpRequest, since fetch reports none. */
export function upload(file, onProgress, signal) {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    form.append("purpose", "assistants");
    form.append("file", file, file.name);
    const sent = new XMLHttpRequest();
    sent.open("POST", address("v1/files"));
    for (const [name, value] of Object.entries(headers())) sent.setRequestHeader(name, value);
    sent.upload.onprogress = (event) => event.lengthComputable && onProgress(event.loaded / event.total);
    sent.onload = () => {
      if (sent.status !== 200) return reject(failure(sent.status, sent.responseText));
      try {
        return resolve(parsed(sent.status, sent.responseText));
      } catch (error) {
        return reject(error);
      }
    };
    sent.onerror = () => reject(new ApiError("The upload was cut. Is the server still running?"));
    sent.onabort = () => reject(new ApiError("stopped"));
    signal?.addEventListener("abort", () => sent.abort());
    sent.send(form);
  });
}
