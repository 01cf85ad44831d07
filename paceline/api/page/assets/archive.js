// The conversations of this browser, as this tab shows them, and their copies at /v1/conversations where they are to be kept
// there. Other tabs keep theirs in the same storage, other browsers at the same server: what either has is merged before it is
// replaced. Each is of the key with which it was begun; other keys of this browser see nothing of it.

import { gone, request, requestAll } from "./api.js";
import { bytesOf, cut, DONE, FIELDS, merge, newAnswer, newConversation } from "./conversation.js";
import { deleteConversation, loadConversations, ownConversations, saveConversation } from "./storage.js";

const MADE_BY = "paceline page"; // in the metadata
const BURIED = "paceline page: deleted"; // of the one whose items are the ids of deleted ones
const BATCH = 20; // items of one request, and their bytes, unless it is one
const BYTES = 500_000;
const BEGINNING = 10_000; // characters
const VALUE = 500; // characters of one value of the metadata
const STORES = 16; // of one conversation, whose ids fit into one

export class Archive {
  /** writing: a map whose keys are the conversations that are being written here, to {answer}. failed: is called with the key
   * of a sentence when something does not keep what it should, and why; with none when the server keeps it again. */
  constructor(writing, failed) {
    this.writing = writing;
    this.failed = failed;
    this.conversations = []; // the latest first
    this.deleted = []; // here, but not yet at the server: the ids of what it has of each
    this.owner = ""; // a name of the key in use
    this.taken = false; // the server has answered to that key
    this.kept = false; // at the server as well
    this.queue = Promise.resolve(); // of what the server is to keep
    this.failing = false; // what was last in the queue
    this.full = false; // the storage, when it was last to keep something
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
    // Those without one were begun in this page, before a key was taken.
    this.conversations = this.conversations.filter((each) => each.owner === undefined || each.owner === owner);
    const held = new Set(this.conversations);
    await this.takeOver();
    for (const each of this.conversations) {
      if (held.has(each)) continue;
      for (const message of each.messages) if (message.state === "writing" && !message.response) message.state = "cut";
    }
  }

  async stored() {
    const all = await loadConversations(this.owner);
    const held = new Map(this.deleted.filter((each) => each.owner === this.owner).map((each) => [each.id, each]));
    const unsaved = [...held.values()].filter(({ stored }) => !stored);
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

  /** Take over what other tabs have kept since. Raises what the storage does. */
  async takeOver() {
    const stored = await this.stored();
    const there = new Set(stored.map((each) => each.id));
    this.conversations = this.conversations.filter((each) => !each.stored || there.has(each.id));
    for (const each of stored) {
      const held = this.find(each.id);
      if (held) this.merge(held, each);
      else this.conversations.push(each);
    }
    this.sort();
  }

  merge(conversation, other) {
    merge(conversation, other, this.writing.get(conversation)?.answer);
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
    saveConversation(conversation).then(
      (there) => {
        if (!there) this.leave(conversation);
        if (this.full) this.failed("");
        this.full = false;
      },
      () => {
        if (conversation.deleted) return this.drop(conversation);
        this.full = true;
        return this.failed("cannotKeep");
      },
    );
  }

  leave(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
  }

  remove(conversation) {
    this.leave(conversation);
    this.forget(conversation);
  }

  drop({ id }) {
    deleteConversation(id).catch(() => this.failed("cannotKeep"));
  }

  /** Keep of a removed conversation what the server has of it, until that is deleted too: now, or when it answers again. */
  forget(conversation) {
    const { id, owner, server, stores } = conversation;
    const responses = responsesOf(conversation);
    this.deleted = this.deleted.filter((each) => each.id !== id);
    if (!this.kept && !server && !stores.length && !responses.length) { // otherwise a server's answer may have been lost
      this.drop(conversation);
      return;
    }
    const left = { id, owner, server, stores, responses, deleted: true };
    this.deleted.push(left);
    this.save(left);
    this.inTurn(() => this.bury());
  }

  // ---- at the server --------------------------------------------------------------------------------------------------
  /** One change after the other. What fails is tried again with the next change, since it is not marked as sent. */
  inTurn(work) {
    const ended = (key, reason) => {
      if (key || this.failing) this.failed(key || (this.full ? "cannotKeep" : ""), reason);
      this.failing = Boolean(key);
    };
    this.queue = this.queue.then(work).then(() => ended(""), ({ message }) => ended(this.deleted.length ? "deletesLater" : "keepsNotAll", message));
    return this.queue;
  }

  async push(conversation) {
    if (!this.has(conversation) || (await this.send(conversation).then(() => true, gone))) return;
    await this.exhume(await requestAll("v1/conversations"));
    this.lose(conversation);
    if (this.has(conversation)) await this.send(conversation);
  }

  async send(conversation) {
    if (conversation.server) this.merge(conversation, copyOf(await request(`v1/conversations/${conversation.server}`)));
    else {
      const { id: server, created_at: seen } = await request("v1/conversations", { method: "POST", body: { metadata: metadataOf(conversation) } });
      Object.assign(conversation, { server, seen, sent: [] });
      if (!this.has(conversation)) return this.forget(conversation); // deleted meanwhile, when this was not known
    }
    const path = `v1/conversations/${conversation.server}`;
    const unsent = conversation.messages.map(itemOf).filter((item) => item && !conversation.sent.includes(item.id));
    let failure = null;
    for (const items of batches(unsent)) {
      const send = (body) => request(`${path}/items`, { method: "POST", body });
      await send({ items }).catch((error) => {
        if (error.status !== 413) throw error;
        failure = error; // of one that is too long others have the beginning, so that what follows has its place
        return send({ items: items.map((item) => ({ ...item, content: `${cut(item.content, BEGINNING)}…` })) });
      });
      conversation.sent.push(...items.map(({ id }) => id));
    }
    await request(path, { method: "POST", body: { metadata: metadataOf(conversation) } }); // after the messages that it names
    if (this.has(conversation)) this.save(conversation);
    if (failure) throw failure;
    return undefined;
  }

  /** Take over what other browsers have kept at the server, after what this one is deleting. */
  async pull() {
    const before = this.conversations.filter(({ server }) => server);
    const all = await requestAll("v1/conversations");
    await this.exhume(all);
    const there = Map.groupBy(all.filter(({ metadata }) => metadata.made_by === MADE_BY && metadata.id), ({ metadata }) => metadata.id);
    for (const held of this.conversations) {
      if (this.buried.ids.has(held.id) || (before.includes(held) && !there.has(held.id))) this.lose(held);
    }
    const deleted = new Set([...this.buried.ids, ...this.deleted.map(({ id }) => id)]);
    for (const [id, copies] of there) if (!deleted.has(id)) await this.take(id, copies);
    this.sort();
  }

  /** The server has it no more. What was not deleted has expired, or another server answers at this address: it stays here. */
  lose(conversation) {
    if (conversation.away || this.buried.ids.has(conversation.id)) this.leave(conversation);
    else Object.assign(conversation, { server: "", sent: [], seen: 0 });
    if (!this.buried.ids.has(conversation.id)) return;
    const unsent = conversation.messages.filter((message) => !conversation.sent.includes(itemOf(message)?.id));
    this.forget({ ...conversation, server: "", messages: unsent }); // of the others who has deleted it knew
  }

  /** Take over a conversation of which the server has these copies: two where two tabs or browsers have begun to keep it at
   * once, or a server's answer was lost. Of these the same is left by all. */
  async take(id, copies) {
    const [{ id: server, metadata }, ...more] = copies.sort((one, other) => (one.id < other.id ? -1 : 1));
    const held = this.find(id);
    const seen = Math.max(...copies.map(({ paceline }) => paceline.updated_at));
    if (held?.server === server && held.seen >= seen && !more.length) return;
    const conversation = held ?? { ...copyOf(copies[0]), away: true };
    if (!held) this.conversations.push(conversation);
    let items = { sent: [] };
    if (conversation.away && !more.length) this.merge(conversation, copyOf(copies[0]));
    else for (const copy of copies.reverse()) items = (await this.fetch(conversation, copy).catch(gone)) ?? items;
    Object.assign(conversation, { server, seen, sent: items.sent });
    if (more.length || JSON.stringify(metadataOf(conversation)) !== JSON.stringify(metadata)) await this.push(conversation);
    for (const copy of more) await request(`v1/conversations/${copy.id}`, { method: "DELETE" }).catch(gone);
  }

  /** Bring what the server has of a conversation into it. copy: as the server lists it. Raises ApiError. */
  async fetch(conversation, copy = null) {
    const server = copy?.id ?? conversation.server;
    const [told, items] = await Promise.all([copy ?? request(`v1/conversations/${server}`), this.items(server)]);
    this.merge(conversation, { ...copyOf(told), ...items, away: false });
    if (this.has(conversation)) this.save(conversation);
    return items;
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
    if (!this.deleted.length) return;
    const listed = this.kept || this.deleted.some(({ server }) => server);
    const all = listed ? await requestAll("v1/conversations") : [];
    if (listed) await this.exhume(all);
    let failure = null;
    for (const left of [...this.deleted]) {
      try {
        await this.delete(left, all.filter(({ metadata }) => metadata.id === left.id));
        this.deleted = this.deleted.filter((each) => each !== left);
        if (!this.deleted.some(({ id }) => id === left.id)) this.drop(left);
      } catch (error) {
        failure = error;
        if (!error.status) break; // nobody answers
      }
    }
    if (failure) throw failure;
  }

  /** copies: what the server has of it, with what other browsers have added. */
  async delete({ id, server, stores, responses }, copies) {
    if (server || copies.length) { // told before it is done, so that nobody takes it for expired
      const items = [{ type: "message", role: "user", content: id }];
      if (this.grave) await request(`v1/conversations/${this.grave}/items`, { method: "POST", body: { items } });
      else this.grave = (await request("v1/conversations", { method: "POST", body: { metadata: { made_by: BURIED }, items } })).id;
    }
    for (const copy of copies) {
      responses = [...new Set([...responses, ...responsesOf((await this.items(copy.id).catch(gone)) ?? { messages: [] })])];
      stores = [...new Set([...stores, ...copyOf(copy).stores])];
    }
    for (const response of responses) await request(`v1/responses/${response}`, { method: "DELETE" }).catch(gone);
    for (const store of stores) {
      const files = await requestAll(`v1/vector_stores/${store}/files`).catch((error) => gone(error) ?? []);
      for (const file of files) await request(`v1/files/${file.id}`, { method: "DELETE" }).catch(gone);
      await request(`v1/vector_stores/${store}`, { method: "DELETE" }).catch(gone);
    }
    for (const copy of copies) await request(`v1/conversations/${copy.id}`, { method: "DELETE" }).catch(gone);
  }

  /** Read which conversations were deleted, by whatever browser. all: what is kept at the server, with their list. */
  async exhume(all) {
    const lists = all.filter(({ metadata }) => metadata.made_by === BURIED); // two where two browsers have begun one at once
    this.grave = lists[0]?.id ?? "";
    const seen = Math.max(0, ...lists.map(({ paceline }) => paceline.updated_at));
    if (seen <= this.buried.seen) return;
    const items = (await Promise.all(lists.map(({ id }) => requestAll(`v1/conversations/${id}/items`, "order=asc")))).flat();
    this.buried = { seen, ids: new Set(items.map(({ content }) => content[0].text)) };
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

function responsesOf({ messages }) {
  return messages.filter(({ response, kept }) => response && kept).map(({ response }) => response);
}

// ---- the form of OpenAI's conversations -----------------------------------------------------------------------------
/** The system prompt is written as it is, so that the longest one (of 16 pairs) fits. */
function metadataOf(conversation) {
  const { id, title, updated, pinned, leaf, temperature, top_p, max_tokens, changed, stores } = conversation;
  const pairs = {
    made_by: MADE_BY, id, title: cut(title, VALUE), stores: stores.slice(0, STORES).join(" "), changed: JSON.stringify(changed, FIELDS),
    fields: JSON.stringify({ updated, pinned, leaf, temperature, top_p, max_tokens }),
  };
  const characters = [...(conversation.system ?? "")];
  for (let at = 0; at < characters.length; at += VALUE) pairs[`system${at / VALUE}`] = characters.slice(at, at + VALUE).join("");
  return pairs;
}

/** What the server has of a conversation, as a copy of which no messages are known. */
function copyOf({ id: server, metadata }) {
  const system = Object.keys(metadata).filter((name) => name.startsWith("system")).sort().map((name) => metadata[name]).join("");
  const { id, title = "", stores = "" } = metadata;
  let fields = {};
  let changed = {};
  try {
    [fields, changed] = [metadata.fields, metadata.changed].map((text) => Object(JSON.parse(text)));
  } catch {
    // another program has written it
  }
  const { updated, pinned = false, leaf = null, temperature, top_p, max_tokens } = fields;
  return {
    ...newConversation(), id, title, system, pinned, leaf, temperature, top_p, max_tokens, changed, updated: Number(updated) || 0,
    stores: stores.split(" ").filter(Boolean), server, away: true,
  };
}

/** The place in the tree is in an item's id: message, parent, response, state. An answer has one when it begins, and one more
 * when it has ended: items do not change. */
function itemOf({ id, parent, role, text, response, state }) {
  if (role !== "user" && state === "writing" && !response) return null;
  return {
    type: "message", role, id: ["msg", id, parent ?? "", response ?? "", role === "user" ? "" : state].join("."),
    content: role === "user" || DONE.has(state) ? text : "",
  };
}

function messageOf({ id: place, role, content }) {
  const [kind, id, parent, response, state] = place.split(".");
  if (kind !== "msg" || state === undefined) return null; // of another program
  const said = { id, parent: parent || null, text: content.map((part) => part.text ?? "").join("") };
  if (role === "user") return { role, ...said };
  return { ...newAnswer(), ...said, response, kept: Boolean(response), state: DONE.has(state) ? state : "writing", bare: Boolean(response) };
}
