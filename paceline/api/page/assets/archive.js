// The conversations of this browser, as this tab shows them, and their copies at /v1/conversations where they are to be kept
// there. Other tabs keep theirs in the same storage, other browsers at the same server: what either has is merged. Each is of
// the key with which it was begun; other keys of this browser see nothing of it.

import { request, requestAll } from "./api.js";
import { bytesOf, cut, DONE, merge, newAnswer, newConversation } from "./conversation.js";
import { deleteConversation, loadConversations, ownConversations, saveConversation } from "./storage.js";

const MADE_BY = "paceline page"; // in the metadata
const BURIED = "paceline page: deleted"; // of the one whose items are the ids of deleted ones
const BATCH = 20; // items of one request, and their bytes, unless it is one
const BYTES = 500_000;
const VALUE = 500; // characters of one value of the metadata

export class Archive {
  /** failed: is called with the key of a sentence when something does not keep what it should, and why; with none when the
   * server keeps it again. */
  constructor(failed) {
    this.failed = failed;
    this.conversations = []; // the latest first
    this.deleted = []; // here, but not yet at the server: the ids of what it has of each
    this.unsaved = new Set(); // of both: what the storage has not taken, or not yet
    this.owner = ""; // a name of the key in use
    this.taken = false; // the server has answered to that key
    this.kept = false; // at the server as well
    this.queue = Promise.resolve(); // of what the server is to keep
    this.failing = false; // what was last in the queue
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

  /** Hold what the storage has of this owner, and nothing of others. Raises what the storage does. Answers that nobody writes
   * any more are told as cut. */
  async load(owner) {
    this.owner = owner;
    this.conversations = this.conversations.filter((each) => each.owner === undefined); // begun in this page, before a key was taken
    this.conversations.push(...(await this.stored()));
    for (const { messages } of this.conversations) {
      for (const message of messages) if (message.state === "writing" && !message.response) message.state = "cut";
    }
  }

  async stored() {
    const all = await loadConversations(this.owner);
    const held = new Map(this.deleted.filter((each) => each.owner === this.owner).map((each) => [each.id, each]));
    const unsaved = [...held.values()].filter((each) => this.unsaved.has(each));
    const others = all.filter(({ id, deleted }) => deleted && !unsaved.some((each) => each.id === id));
    this.deleted = [...unsaved, ...others.map((each) => held.get(each.id) ?? each)];
    return all.filter((each) => !each.deleted);
  }

  /** The server has taken the key in use: what no key has is this one's from now on. */
  async own() {
    this.taken = true;
    for (const each of this.conversations) each.owner ??= this.owner;
    await ownConversations(this.owner).catch(() => {}); // of this tab alone
  }

  /** Take over what other tabs have kept since. writing: a map whose keys are the conversations being written here. */
  async catchUp(writing) {
    let stored;
    try {
      stored = await this.stored();
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
    if (this.taken) conversation.owner ??= this.owner;
    this.unsaved.add(conversation);
    saveConversation(conversation).then(
      () => this.unsaved.delete(conversation),
      () => (conversation.deleted ? this.drop(conversation) : this.failed("cannotKeep")),
    );
  }

  /** elsewhere: the server has nothing of it any more. */
  remove(conversation, elsewhere = false) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.unsaved.delete(conversation);
    if (elsewhere) this.drop(conversation);
    else this.forget(conversation);
  }

  drop({ id }) {
    deleteConversation(id).catch(() => this.failed("cannotKeep"));
  }

  /** Keep of a removed conversation what the server has of it, until that is deleted too: now, or when it answers again. */
  forget(conversation) {
    const { id, owner, server, store, away } = conversation;
    const responses = responsesOf(conversation);
    this.deleted = this.deleted.filter((each) => each.id !== id);
    if (!server && !store && !responses.length) {
      this.drop(conversation);
      return;
    }
    const left = { id, owner, server, store, away, responses, deleted: true };
    this.deleted.push(left);
    this.save(left);
    this.inTurn(() => this.bury());
  }

  // ---- at the server --------------------------------------------------------------------------------------------------
  /** One change after the other. What fails is tried again with the next change, since it is not marked as sent. */
  inTurn(work) {
    const ended = (key, reason) => {
      if (key || this.failing) this.failed(key, reason);
      this.failing = Boolean(key);
    };
    this.queue = this.queue.then(work).then(() => ended(""), ({ message }) => ended(this.deleted.length ? "deletesLater" : "keepsNotAll", message));
    return this.queue;
  }

  async push(conversation) {
    if (!this.has(conversation) || conversation.away) return; // deleted meanwhile
    const metadata = metadataOf(conversation);
    if (!conversation.server) {
      conversation.server = (await request("v1/conversations", { method: "POST", body: { metadata } })).id;
      if (!this.has(conversation)) { // deleted meanwhile, when this was not known
        this.forget({ ...conversation, id: conversation.server, store: "", messages: [] });
        return;
      }
    } else {
      await request(`v1/conversations/${conversation.server}`, { method: "POST", body: { metadata } });
    }
    const items = conversation.messages.map(itemOf).filter((item) => item && !conversation.sent.includes(item.id));
    let failure = null;
    for (const batch of batches(items)) {
      try {
        await request(`v1/conversations/${conversation.server}/items`, { method: "POST", body: { items: batch } });
        conversation.sent.push(...batch.map(({ id }) => id));
      } catch (error) {
        if (error.status !== 413) throw error;
        failure = error; // one that is too long does not keep the others here
      }
    }
    if (this.has(conversation)) this.save(conversation);
    if (failure) throw failure;
  }

  /** Take over what other browsers have kept at the server, after what this one is deleting. True: something changed. */
  async pull(writing) {
    const before = this.conversations.filter(({ server }) => server);
    const all = await requestAll("v1/conversations");
    const deleted = new Set(this.deleted.map(({ server }) => server));
    const listed = all.filter(({ id, metadata }) => metadata.made_by === MADE_BY && !deleted.has(id));
    await this.exhume(all);
    const there = new Set(listed.map(({ id }) => id));
    let changed = false;
    for (const held of before) {
      if (there.has(held.server) || writing.has(held)) continue;
      changed = true;
      // What is not there and was not deleted has expired, or another server answers at this address: it stays here.
      if (this.buried.ids.has(held.server)) this.remove(held, true);
      else Object.assign(held, { server: "", sent: [] });
    }
    for (const { id, metadata, paceline } of listed) {
      const held = this.conversations.find((each) => each.server === id);
      if (held && (held.seen >= paceline.updated_at || writing.has(held))) continue;
      const told = { ...described(metadata), seen: paceline.updated_at, server: id };
      if (!held) this.conversations.push({ ...newConversation(), ...told, id, away: true });
      else if (held.away) Object.assign(held, told);
      else merge(held, { ...held, ...told, ...(await this.items(id).catch(gone)) }, writing.get(held)?.answer);
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

  /** Delete at the server what was deleted here. What fails is tried again when the page is looked at, or opened. */
  async bury() {
    let failure = null;
    for (const left of [...this.deleted]) {
      try {
        await this.delete(left);
        this.unsaved.delete(left);
        this.deleted = this.deleted.filter((each) => each !== left);
        if (!this.deleted.some(({ id }) => id === left.id)) this.drop(left);
      } catch (error) {
        failure = error;
        if (!error.status) break; // nobody answers
      }
    }
    if (failure) throw failure;
  }

  async delete({ server, store, away, responses }) {
    if (server) { // told before it is done, so that nobody takes it for expired
      if (!this.grave) await this.exhume(await requestAll("v1/conversations"));
      if (away) responses = responsesOf(await this.items(server).catch((error) => gone(error) ?? { messages: [] }));
      const items = [{ type: "message", role: "user", content: server }];
      if (this.grave) await request(`v1/conversations/${this.grave}/items`, { method: "POST", body: { items } });
      else this.grave = (await request("v1/conversations", { method: "POST", body: { metadata: { made_by: BURIED }, items } })).id;
      await request(`v1/conversations/${server}`, { method: "DELETE" }).catch(gone);
    }
    for (const response of responses) await request(`v1/responses/${response}`, { method: "DELETE" }).catch(gone);
    if (!store) return;
    const files = await requestAll(`v1/vector_stores/${store}/files`).catch((error) => gone(error) ?? []);
    for (const { id } of files) await request(`v1/files/${id}`, { method: "DELETE" }).catch(gone);
    await request(`v1/vector_stores/${store}`, { method: "DELETE" }).catch(gone);
  }

  /** Read which conversations were deleted, by whatever browser. all: what is kept at the server, with their list. */
  async exhume(all) {
    const listed = all.find(({ metadata }) => metadata.made_by === BURIED);
    this.grave = listed?.id ?? "";
    if (!listed || listed.paceline.updated_at <= this.buried.seen) return;
    const items = await requestAll(`v1/conversations/${listed.id}/items`, "order=asc");
    this.buried = { seen: listed.paceline.updated_at, ids: new Set(items.map(({ content }) => content[0].text)) };
  }
}

/** Items in lists of which each fits into a request. */
function* batches(items) {
  let batch = [];
  let left = BYTES;
  for (const item of items) {
    const size = bytesOf(item);
    if (batch.length === BATCH || (batch.length && size > left)) {
      yield batch;
      batch = [];
      left = BYTES;
    }
    batch.push(item);
    left -= size;
  }
  if (batch.length) yield batch;
}

function gone(error) {
  if (error.status !== 404) throw error;
}

function responsesOf({ messages }) {
  return messages.filter(({ response, kept }) => response && kept).map(({ response }) => response);
}

// ---- the form of OpenAI's conversations -----------------------------------------------------------------------------
/** The system prompt is written as it is, so that the longest one (of 16 pairs) fits. */
function metadataOf({ title, pinned, updated, leaf, options: { system = "", ...options }, store }) {
  const pairs = { made_by: MADE_BY, title: cut(title, VALUE), pinned: String(pinned), updated: String(updated), leaf: leaf ?? "", store };
  const characters = [...system];
  for (let at = 0; at < characters.length; at += VALUE) pairs[`system${at / VALUE}`] = characters.slice(at, at + VALUE).join("");
  return { ...pairs, options: JSON.stringify(options) };
}

function described(metadata) {
  const system = Object.keys(metadata).filter((name) => name.startsWith("system")).sort().map((name) => metadata[name]).join("");
  let options = {};
  try {
    options = { ...JSON.parse(metadata.options), ...(system ? { system } : {}) };
  } catch {
    // another program has written it
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
