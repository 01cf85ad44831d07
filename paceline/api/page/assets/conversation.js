// A conversation: a tree of messages, of which one path is shown. Knows its shape, its files and the requests made of it,
// nothing of the screen or the server. Copies of two tabs or two browsers are merged: messages and stores of files are only
// ever added, so that either's are taken (an edited question and an answer written anew are further children of the same
// parent), and of each other field the later change.

const TITLE = 60; // characters
const SYSTEM = 4000; // of a system prompt
const LONGEST = 900_000; // bytes of the messages of one request, of which the server takes 1 MiB
export const DONE = new Set(["done", "stopped", "failed", "cut"]);
export const FIELDS = ["title", "pinned", "leaf", "system", "temperature", "top_p", "max_tokens"];

/** Where the page came over plain http from another machine, `crypto.randomUUID` is missing. */
export function randomId(bytes = 6) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * `id`: in each browser and at the server. `leaf`: id of the last message shown. `changed`: when (ms since 1970) each of FIELDS
 * was. `stores`: ids of the vector stores of its files. `stored`: this browser has it. `server`: its id at /v1/conversations;
 * `sent`: the items that are there; `seen`: when they last changed; `away`: its messages are there alone, for now.
 */
export function newConversation() {
  return {
    id: randomId(16), title: "", pinned: false, updated: Date.now(), leaf: null, changed: {}, stores: [], messages: [],
    stored: false, server: "", sent: [], seen: 0, away: false,
  };
}

/** The beginning of a text, of whole characters. */
export function cut(text, size) {
  return [...text].slice(0, size).join("");
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  const short = cut(line, TITLE);
  return short === line ? line : `${short}…`;
}

/**
 * An answer before its first token. `state`: writing, done, stopped, failed, cut; unread: what the server has of it could not be
 * read. `response`: its id, and `sequence` its last
 * event; `kept`: the server goes on with it when nobody reads. `model`: which was asked, and `context` its tokens. `bare`: its lanes and report are at the server alone, for now.
 */
export function newAnswer() {
  return {
    role: "assistant", text: "", lanes: "", thought: "", steps: [], calls: [], state: "writing", error: "", finish: "",
    report: null, usage: null, seconds: 0, response: "", sequence: -1, kept: false, model: "", context: 0,
  };
}

/** Give some of FIELDS these values, later than any copy that is known. */
export function change(conversation, fields) {
  for (const [name, value] of Object.entries(fields)) {
    if (conversation[name] === value) continue;
    conversation[name] = value;
    conversation.changed[name] = Math.max(Date.now(), (conversation.changed[name] ?? 0) + 1);
  }
}

/** Add a message below another, the last one shown if none is named, and show it. */
export function add(conversation, message, parent = pathOf(conversation).at(-1)?.id ?? null) {
  message.id ??= randomId();
  message.parent = parent;
  conversation.messages.push(message);
  change(conversation, { leaf: message.id });
  return message;
}

/** The messages that are shown, the first one first: to the last of all where a copy names one that has not come. */
export function pathOf({ messages, leaf }) {
  const by = new Map(messages.map((each) => [each.id, each]));
  const path = [];
  for (let at = by.get(leaf) ?? messages.at(-1); at && path.length <= messages.length; at = by.get(at.parent)) path.push(at);
  return path.reverse();
}

/** A message and the others in its place, the oldest first. */
export function versionsOf({ messages }, { parent, role }) {
  return messages.filter((each) => each.parent === parent && each.role === role);
}

/** Show this message, and below it what was said last. */
export function turnTo(conversation, message) {
  let last = message;
  let left = conversation.messages.length; // another program may have written a circle
  for (let next = last; next && left; next = conversation.messages.findLast((each) => each.parent === last.id), left -= 1) last = next;
  change(conversation, { leaf: last.id });
}

/** Bring what another copy has into this one, in place, and nothing else: in whatever order copies are merged, they end alike.
 * `own`: the message that is being written here, where people go on looking at it. */
export function merge(conversation, other, own = null) {
  const by = new Map(conversation.messages.map((each) => [each.id, each]));
  for (const message of other.messages) {
    const held = by.get(message.id);
    if (!held) conversation.messages.push(message);
    else if (held !== own && held.role !== "user" && rank(held) < rank(message)) Object.assign(held, message);
  }
  for (const name of FIELDS) {
    if (!other.changed[name] || stampOf(other, name) <= stampOf(conversation, name)) continue;
    const stays = own && name === "leaf";
    if (!stays) conversation[name] = other[name];
    conversation.changed[name] = other.changed[name] + (stays ? 1 : 0);
  }
  conversation.stores = [...new Set([...conversation.stores, ...other.stores])].sort();
  conversation.updated = Math.max(conversation.updated, other.updated);
  if (other.server === conversation.server) conversation.sent = [...new Set([...conversation.sent, ...other.sent])];
  else if (other.seen > conversation.seen) Object.assign(conversation, { server: other.server, sent: other.sent });
  conversation.seen = Math.max(conversation.seen, other.seen);
  conversation.away &&= other.away;
}

/** When a field was changed, and to what: of two changes of one moment all copies take the same. */
function stampOf(conversation, name) {
  return `${String(conversation.changed[name] ?? 0).padStart(16, "0")} ${JSON.stringify(conversation[name])}`;
}

/** How much of an answer a copy has. */
function rank({ state, sequence = -1, report, bare }) {
  return (DONE.has(state) ? 1e9 : 0) + (report ? 1e8 : 0) + sequence + (bare ? 0 : 0.5);
}

export function bytesOf(value) {
  return new TextEncoder().encode(JSON.stringify(value)).length;
}

/** As many of the last messages as a request can hold, from a question on: the server leaves out the first ones as well, where
 * there are too many for its model. */
function lastOf(messages) {
  let left = LONGEST;
  const beyond = messages.findLastIndex((message) => (left -= bytesOf(message)) < 0);
  return messages.slice(messages.findIndex(({ role }, index) => index > beyond && role === "user"));
}

/** The body of a request for an answer to what is shown. `stores`: of uploads. `kept`: the server goes on by itself. */
export function requestBody(conversation, settings, stores, kept) {
  const { system, temperature, top_p: topP, max_tokens: maxTokens } = conversation;
  const own = { report: true, timeline: true };
  if (settings.strategy) own.strategy = settings.strategy;
  if (settings.privacy) own.privacy = settings.privacy;
  if (!settings.documents) own.documents = 0;
  else if (stores.length) own.vector_stores = ["default", ...stores];
  if (settings.model.includes(":")) own.steps = true; // a workflow, which tells of its stages
  const said = pathOf(conversation).filter(({ text }) => text);
  const body = {
    model: settings.model,
    input: lastOf(said.map(({ role, text }) => ({ type: "message", role, content: text }))),
    stream: true,
    background: kept,
    store: kept,
    truncation: "auto",
    paceline: own,
  };
  if (system) body.instructions = system;
  if (Number.isFinite(temperature)) body.temperature = temperature;
  if (Number.isFinite(topP)) body.top_p = topP;
  if (Number.isFinite(maxTokens)) body.max_output_tokens = maxTokens;
  return body;
}

// ---- files ----------------------------------------------------------------------------------------------------------
const KIND = "paceline conversations";

/** What is shown of a conversation, for people. */
export function asMarkdown(conversation, words) {
  const parts = pathOf(conversation).map(({ role, text, report }) => {
    const cited = (report?.citations ?? []).map(({ document, place }, index) => `${index + 1}. ${document}${place ? `, ${place}` : ""}`);
    return [`## ${role === "user" ? words.you : words.answer}`, text, ...(cited.length ? [`${words.sources}:`, cited.join("\n")] : [])].join("\n\n");
  });
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}

export function asJson(conversations) {
  const kept = conversations.map(({ updated, messages, ...each }) => ({ updated, messages, ...Object.fromEntries(FIELDS.map((name) => [name, each[name]])) }));
  return JSON.stringify({ kind: KIND, version: 1, conversations: kept }, null, 1);
}

const CITATION = { side: "", document: "", passage: "", score: 0, place: "", url: "" };
const MOMENT = { side: "", kind: "", of: "", ms: 0, number: 0, took_ms: 0 };
const USE = { joules: 0, meter: "" };
const REPORT = {
  strategy: "", why: "", degraded: "", citations: [CITATION], confirmation_needed: [{ id: "", document: "" }], timeline: [MOMENT],
  energy: { device: USE, cloud: USE },
};
const ANSWER = {
  ...newAnswer(), steps: [""], calls: [{ name: "", arguments: "" }], report: REPORT,
  usage: { input_tokens: 0, output_tokens: 0, total_tokens: 0 },
};
const CONVERSATION = {
  title: "", pinned: false, updated: 0, leaf: "", system: "", temperature: 0, top_p: 0, max_tokens: 0,
};

/** What is of a shape in something of any: the fields of its objects and the members of its lists. `undefined`: nothing. */
function fitting(found, shape) {
  if (Array.isArray(shape)) return Array.isArray(found) ? found.map((each) => fitting(each, shape[0])).filter((each) => each !== undefined) : undefined;
  if (found === null || typeof found !== typeof shape || Array.isArray(found)) return undefined;
  if (typeof shape !== "object") return Math.abs(found) === Infinity ? undefined : found;
  return Object.fromEntries(Object.keys(shape).map((name) => [name, fitting(found[name], shape[name])]).filter(([, value]) => value !== undefined));
}

/** The conversations of such a file, as new ones that can be shown whatever it holds. Raises for any other file. */
export function fromJson(text) {
  const { kind, version, conversations } = JSON.parse(text);
  if (kind !== KIND || version !== 1) throw new Error(kind);
  return conversations.filter((each) => Array.isArray(each?.messages)).map((each) => {
    const plain = each.messages.filter((one) => ["user", "assistant"].includes(one?.role) && typeof one.text === "string");
    const known = new Set();
    const messages = plain.map((message) => takenFrom(message, known));
    const { title = titleOf(messages[0]?.text ?? ""), leaf, system = "", ...found } = fitting(each, CONVERSATION);
    return { ...newConversation(), ...found, title, system: cut(system, SYSTEM), leaf: known.has(leaf) ? leaf : (messages.at(-1)?.id ?? null), messages };
  });
}

/** A message of a file as this page would have written it: its own fields, of their types, below one that comes before it. */
function takenFrom(message, known) {
  const { role, text } = message;
  const found = role === "user" ? { role, text } : { ...newAnswer(), ...fitting(message, ANSWER) };
  if (role !== "user") Object.assign(found, { state: DONE.has(message.state) ? message.state : "cut", response: "", sequence: -1, kept: false });
  const named = typeof message.id === "string";
  found.id = named && /^\w{1,64}$/.test(message.id) && !known.has(message.id) ? message.id : randomId();
  const before = named ? null : [...known].at(-1); // a list without ids is one line of messages
  found.parent = known.has(message.parent) ? message.parent : (before ?? null);
  known.add(found.id);
  return found;
}
