// Requests to the server that this page came from, over OpenAI's API. Addresses are relative, so that the page also works
// below a path of a reverse proxy.

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
export function savedKey() {
  return recall(KEY, "sessionStorage") ?? recall(KEY) ?? "";
}

/** lasting: also when the browser is closed. */
export function saveKey(key, lasting) {
  keep(KEY, lasting ? null : key, "sessionStorage");
  keep(KEY, lasting ? key : null);
}

function headers(more = {}) {
  const key = savedKey();
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

function address(path) {
  return new URL(path, document.baseURI).href;
}

// ---- requests -------------------------------------------------------------------------------------------------------
/** The JSON of an answer. Raises ApiError with the server's own sentence. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const answer = await send(path, { method, body, signal });
  return parsed(answer.status, await answer.text());
}

/** The text at a path. Raises ApiError. */
export async function requestText(path) {
  return (await send(path, { method: "GET" })).text();
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
    throw new ApiError(`What answered is not the server, but perhaps a proxy in front of it (status ${status}).`);
  }
}

async function send(path, { method, body, signal }) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const kind = body === undefined ? {} : { "content-type": "application/json" };
  let answer;
  try {
    answer = await fetch(address(path), { method, headers: headers(kind), signal, ...sent, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (!answer.ok) throw failure(answer.status, await answer.text());
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
