// The conversations of this browser, as this tab shows them, and their copies at /v1/conversations where they are to be kept
// there. Other tabs keep theirs in the same storage, other browsers at the same server: what either has is merged.

import { request, requestAll } from "./api.js";
import { DONE, merge, newAnswer, newConversation, upgraded } from "./conversation.js";
import { deleteAllConversations, deleteConversation, loadConversations, saveConversation } from "./storage.js";

const MADE_BY = "paceline page"; // in the metadata
const BURIED = "paceline page: deleted"; // of the one whose items are the ids of deleted ones
const BATCH = 20; // items of one request
const VALUE = 500; // characters of one value of the metadata

export class Archive {
  /** failed: is called with the key of a sentence when something does not keep what it should, and why. */
  constructor(failed) {
    this.failed = failed;
    this.conversations = []; // the latest first
    this.unsaved = new Set(); // of them: what the storage has not taken, or not yet
    this.kept = false; // at the server as well
    this.queue = Promise.resolve(); // of what the server is to keep
    this.grave = ""; // the id of the list of deleted ones, once it is known
    this.buried = { seen: 0, ids: new Set() };
  }

  has(conversation) {
    return this.conversations.includes(conversation);
  }

  find(id) {
    return this.conversations.find((each) => each.id === id);
  }

  sort() {
    this.conversations.sort((one, other) => other.updated - one.updated);
  }

  /** Raises what the storage does. Answers that nobody writes any more are told as cut. */
  async load() {
    this.conversations = (await loadConversations()).map(upgraded);
    for (const { messages } of this.conversations) {
      for (const message of messages) if (message.state === "writing" && !message.response) message.state = "cut";
    }
  }

  /** Take over what other tabs have kept since. writing: a map whose keys are the conversations being written here. */
  async catchUp(writing) {
    let stored;
    try {
      stored = (await loadConversations()).map(upgraded);
    } catch {
      return; // of this tab alone
    }
    const gone = new Set(stored.map((each) => each.id));
    this.conversations = this.conversations.filter((each) => gone.has(each.id) || this.unsaved.has(each) || writing.has(each));
    for (const each of stored) {
      const held = this.find(each.id);
      if (held) merge(held, each, writing.get(held)?.answer);
      else this.conversations.push(each);
    }
    this.sort();
  }

  /** Keep a conversation that was begun or has changed. sent: at the server too. */
  remember(conversation, sent = true, updated = Date.now()) {
    conversation.updated = updated;
    if (!this.has(conversation)) this.conversations.push(conversation);
    this.sort();
    this.save(conversation);
    if (sent && this.kept) this.inTurn(() => this.push(conversation));
  }

  save(conversation) {
    this.unsaved.add(conversation);
    saveConversation(conversation).then(() => this.unsaved.delete(conversation), () => this.failed("cannotKeep"));
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.unsaved.delete(conversation);
    deleteConversation(conversation.id).catch(() => this.failed("cannotKeep"));
    this.inTurn(() => this.forget(conversation));
  }

  removeAll() {
    const all = this.conversations;
    this.conversations = [];
    this.unsaved.clear();
    deleteAllConversations().catch(() => this.failed("cannotKeep"));
    for (const each of all) this.inTurn(() => this.forget(each));
  }

  // ---- at the server --------------------------------------------------------------------------------------------------
  /** One change after the other. What fails is tried again with the next change, since it is not marked as sent. */
  inTurn(work) {
    this.queue = this.queue.then(work).catch(({ message }) => this.failed("keepsNothing", message));
    return this.queue;
  }

  async push(conversation) {
    if (!this.has(conversation) || conversation.away) return; // deleted meanwhile
    const metadata = metadataOf(conversation);
    if (!conversation.server) {
      conversation.server = (await request("v1/conversations", { method: "POST", body: { metadata } })).id;
    } else {
      await request(`v1/conversations/${conversation.server}`, { method: "POST", body: { metadata } });
    }
    const items = conversation.messages.map(itemOf).filter((item) => item && !conversation.sent.includes(item.id));
    for (let at = 0; at < items.length; at += BATCH) {
      const batch = items.slice(at, at + BATCH);
      await request(`v1/conversations/${conversation.server}/items`, { method: "POST", body: { items: batch } });
      conversation.sent.push(...batch.map(({ id }) => id));
    }
    if (this.has(conversation)) this.save(conversation);
  }

  /** Take over what other browsers have kept at the server, after what this one is deleting. True: something changed. */
  async pull(writing) {
    const before = this.conversations.filter(({ server }) => server);
    const all = await requestAll("v1/conversations");
    const listed = all.filter(({ metadata }) => metadata.made_by === MADE_BY);
    await this.exhume(all.find(({ metadata }) => metadata.made_by === BURIED));
    const there = new Set(listed.map(({ id }) => id));
    let changed = false;
    for (const held of before) {
      if (there.has(held.server) || writing.has(held)) continue;
      changed = true;
      // What is not there and was not deleted has expired, or another server answers at this address: it stays here.
      if (this.buried.ids.has(held.server)) this.remove(Object.assign(held, { server: "" }));
      else Object.assign(held, { server: "", sent: [] });
    }
    for (const { id, metadata, paceline } of listed) {
      const held = this.conversations.find((each) => each.server === id);
      if (held && (held.seen >= paceline.updated_at || writing.has(held))) continue;
      const told = { ...described(metadata), seen: paceline.updated_at, server: id };
      if (!held) this.conversations.push({ ...newConversation(), ...told, id, away: true });
      else if (held.away) Object.assign(held, told);
      else merge(held, { ...held, ...told, ...(await this.items(id)) }, writing.get(held)?.answer);
      if (held) held.seen = paceline.updated_at;
      changed = true;
    }
    this.sort();
    return changed;
  }

  /** Fetch the messages of a conversation that another browser has begun. */
  async fetch(conversation) {
    if (!conversation.away) return;
    const { messages, sent } = await this.items(conversation.server);
    Object.assign(conversation, { messages, sent, away: false });
    conversation.leaf = messages.some(({ id }) => id === conversation.leaf) ? conversation.leaf : (messages.at(-1)?.id ?? null);
    this.save(conversation);
  }

  async items(id) {
    const items = await requestAll(`v1/conversations/${id}/items`, "order=asc");
    const messages = new Map();
    for (const item of items) {
      const message = messageOf(item);
      if (message) messages.set(message.id, message); // an answer's end comes after its beginning
    }
    return { messages: [...messages.values()], sent: items.map((item) => item.id) };
  }

  async forget({ server, store, messages }) {
    if (server) { // told before it is done, so that nobody takes it for expired
      const items = [{ type: "message", role: "user", content: server }];
      if (this.grave) await request(`v1/conversations/${this.grave}/items`, { method: "POST", body: { items } });
      else this.grave = (await request("v1/conversations", { method: "POST", body: { metadata: { made_by: BURIED }, items } })).id;
      await request(`v1/conversations/${server}`, { method: "DELETE" }).catch(gone);
    }
    for (const { response, kept } of messages) {
      if (response && kept && server) await request(`v1/responses/${response}`, { method: "DELETE" }).catch(gone);
    }
    if (!store) return;
    const files = await requestAll(`v1/vector_stores/${store}/files`).catch((error) => gone(error) ?? []);
    for (const { id } of files) await request(`v1/files/${id}`, { method: "DELETE" }).catch(gone);
    await request(`v1/vector_stores/${store}`, { method: "DELETE" }).catch(gone);
  }

  /** Read which conversations were deleted, by whatever browser. listed: their list, if there is one. */
  async exhume(listed) {
    this.grave = listed?.id ?? "";
    if (!listed || listed.paceline.updated_at <= this.buried.seen) return;
    const items = await requestAll(`v1/conversations/${listed.id}/items`, "order=asc");
    this.buried = { seen: listed.paceline.updated_at, ids: new Set(items.map(({ content }) => content[0].text)) };
  }
}

function gone(error) {
  if (error.status !== 404) throw error;
}

// ---- the form of OpenAI's conversations -----------------------------------------------------------------------------
function metadataOf({ title, pinned, updated, leaf, options, store }) {
  const written = JSON.stringify(options);
  const pairs = { made_by: MADE_BY, title: title.slice(0, VALUE), pinned: String(pinned), updated: String(updated), leaf: leaf ?? "", store };
  for (let at = 0; at < Math.min(written.length, 10 * VALUE); at += VALUE) pairs[`options${at / VALUE}`] = written.slice(at, at + VALUE);
  return pairs;
}

function described(metadata) {
  const parts = Object.keys(metadata).filter((name) => name.startsWith("options")).sort().map((name) => metadata[name]);
  let options = {};
  try {
    options = Object(JSON.parse(parts.join("") || "{}"));
  } catch {
    // longer than the metadata may be
  }
  return { title: metadata.title ?? "", updated: Number(metadata.updated), pinned: metadata.pinned === "true", leaf: metadata.leaf || null, store: metadata.store ?? "", options };
}

/** The place in the tree is in an item's id: message, parent, response, state. An answer has one when it begins, and one more
 * when it has ended: items do not change. */
function itemOf({ id, parent, role, text, response, state }) {
  if (role !== "user" && state === "writing" && !response) return null;
  return {
    type: "message", role, id: ["msg", id, parent ?? "", response ?? "", role === "user" ? "" : state].join("."),
    content: state === "writing" ? "" : text,
  };
}

function messageOf({ id: place, role, content }) {
  const [kind, id, parent, response, state] = place.split(".");
  if (kind !== "msg" || state === undefined) return null; // of another program
  const said = { id, parent: parent || null, text: content.map((part) => part.text ?? "").join("") };
  if (role === "user") return { role, ...said };
  return { ...newAnswer(), ...said, response, kept: Boolean(response), state: DONE.has(state) ? state : "writing", bare: Boolean(response) };
}
