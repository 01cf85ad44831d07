// The conversations of this browser, as this tab shows them. Other tabs keep theirs in the same place: what is newer there
// is taken over by `catchUp`. Not handled: one conversation in which two tabs have answers written at the same time.

import { deleteAllConversations, deleteConversation, loadConversations, saveConversation } from "./storage.js";

export class Archive {
  /** failed: is called when the browser does not keep what it should. */
  constructor(failed) {
    this.failed = failed;
    this.conversations = []; // the latest first
    this.unsaved = new Set(); // of them: what the storage has not taken, or not yet
  }

  has(conversation) {
    return this.conversations.includes(conversation);
  }

  find(id) {
    return this.conversations.find((each) => each.id === id);
  }

  /** Raises what the storage does. Answers that nobody writes any more are told as cut. */
  async load() {
    this.conversations = await loadConversations();
    for (const { messages } of this.conversations) {
      for (const message of messages) if (message.state === "writing") message.state = "cut";
    }
  }

  /** Load again, for what other tabs have kept since. writing: the conversations that stay this tab's own, as a map's keys. */
  async catchUp(writing) {
    const own = new Map(this.conversations.map((each) => [each.id, each]));
    try {
      await this.load();
    } catch {
      this.conversations = [...own.values()]; // of this tab alone
      return;
    }
    this.conversations = this.conversations.map((each) => {
      const held = own.get(each.id);
      return held && (writing.has(held) || held.updated >= each.updated) ? held : each;
    });
    this.conversations.unshift(...[...this.unsaved].filter((each) => !this.find(each.id)));
  }

  /** Keep a conversation that was begun or has changed. */
  remember(conversation) {
    conversation.updated = Date.now();
    if (!this.has(conversation)) this.conversations.unshift(conversation);
    this.unsaved.add(conversation);
    saveConversation(conversation).then(() => this.unsaved.delete(conversation), this.failed);
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.unsaved.delete(conversation);
    deleteConversation(conversation.id).catch(this.failed);
  }

  removeAll() {
    this.conversations = [];
    this.unsaved.clear();
    deleteAllConversations().catch(this.failed);
  }
}
