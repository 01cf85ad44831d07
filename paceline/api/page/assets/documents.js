// Documents: those that this side reads for every answer, by name; and uploads, files of this key in vector stores of their
// own, which answers read as well: for all conversations, and for each that has files.

import { gone, passing, request, requestAll, upload } from "./api.js";
import { icon, legible, make } from "./elements.js";
import { t } from "./text.js";

const MADE_BY = "paceline page"; // in a store's metadata
const FIRST_MS = 150;
const MOST_MS = 2000;

/** {side, total, data} of the documents of this side, as /v1/documents gives them. */
export async function readable() {
  const { data, ...more } = await request("v1/documents");
  return { ...more, data: data.map((each) => ({ ...each, name: legible(each.name) })) };
}

/** Uploads of a conversation or of all, shown as a list. They are in one vector store, or in several where tabs or browsers that
 * knew nothing of each other have made them. */
export class Uploads {
  /** say: is told what happens. conversation: whose files these are, {id, stores}; none: of all. made: is called with the id
   * of a store that is made; raises where nobody wants it any more. */
  constructor(say, conversation = null, made = () => {}) {
    this.list = make("ul", { className: "uploads" });
    this.say = say;
    this.made = made;
    this.conversation = conversation;
    this.known = ""; // the stores whose files are shown
    this.adding = 0; // choices of files that are not all read yet, whose rows are shown already
    this.added = Promise.resolve(); // the end of the last of them
    this.loading = Promise.resolve();
  }

  /** Find the stores, and show what is in them. Raises ApiError. */
  load() {
    if (this.adding) return this.loading;
    const loading = this.loading.catch(() => {}).then(() => this.fetch());
    this.loading = loading;
    return loading;
  }

  async fetch() {
    const stores = await this.stores();
    const listed = (store) => requestAll(`v1/vector_stores/${store}/files`).catch(gone);
    const [files, ...held] = await Promise.all([stores.length ? requestAll("v1/files") : [], ...stores.map(listed)]);
    const names = new Map(files.map((file) => [file.id, file.filename]));
    const lost = { name: t("attachedFiles"), status: "failed", last_error: { message: t("filesLost") } };
    this.show(held.flatMap((each, at) => each?.map((one) => ({ ...one, store: stores[at], name: names.get(one.id) ?? one.id })) ?? [lost]));
    this.known = stores.join();
    const open = held.flat().filter((each) => each?.status === "in_progress");
    this.added = Promise.all([this.added, ...open.map(({ id }) => this.follow(id).catch(({ message }) => this.say(message)))]);
  }

  async stores() {
    if (this.conversation) return this.conversation.stores;
    const all = await requestAll("v1/vector_stores");
    return all.filter(({ metadata }) => metadata?.made_by === MADE_BY && !metadata.conversation).map(({ id }) => id);
  }

  /** Wait until each file is read, those of other tabs and browsers included, or has failed. */
  async settled() {
    if (this.conversation && this.known !== this.conversation.stores.join()) this.load();
    await this.loading.catch(() => {});
    await this.added;
  }

  /** The stores that answers read: where there is something to read. */
  get readable() {
    return [...new Set([...this.list.children].map(({ dataset }) => dataset.store).filter(Boolean))];
  }

  show(entries) {
    const added = [...this.list.children].filter(({ dataset }) => dataset.state === "uploading"); // meanwhile
    this.list.replaceChildren(...entries.map((entry) => this.row(entry)), ...added);
  }

  row({ name: written, ...entry }) {
    const name = legible(written);
    const told = make("span", { className: "state" });
    const progress = make("progress", { max: 1, value: 0, hidden: true, ariaLabel: t("uploading", { name }) });
    const remove = make("button", { type: "button", className: "quiet", ariaLabel: t("remove", { name }), title: t("removeWord") }, icon("close"));
    const row = make("li", {}, icon("file"), make("span", { className: "name", textContent: name, title: name }), progress, told, remove);
    Object.assign(row.dataset, { id: entry.id ?? "", store: entry.store ?? "" });
    row.tell = (state, reason = "") => {
      row.dataset.state = state;
      told.textContent = reason || (state === "uploading" ? "" : t(state));
      progress.hidden = state !== "uploading";
      remove.hidden = state === "uploading";
    };
    row.progress = progress;
    remove.onclick = () => this.remove(row, name);
    row.tell(entry.status, entry.last_error?.message);
    return row;
  }

  /** Upload files and have them read, after those that were chosen before: one store is made for all. */
  add(files) {
    const rows = files.map(({ name }) => this.row({ name, status: "uploading" }));
    this.list.append(...rows);
    this.adding += 1;
    this.added = Promise.all([this.added, this.loading.catch(() => {})]).then(async () => {
      for (const [index, file] of files.entries()) await this.read(file, rows[index]);
      this.adding -= 1;
    });
  }

  async read(file, row) {
    try {
      const store = await this.storeToFill();
      const { id } = await upload(file, (part) => (row.progress.value = part));
      await request(`v1/vector_stores/${store}/files`, { method: "POST", body: { file_id: id } }).catch(async (error) => {
        await request(`v1/files/${id}`, { method: "DELETE" }).catch(() => {}); // nothing would show it
        throw error;
      });
      Object.assign(row.dataset, { id, store });
      row.tell("in_progress");
      await this.follow(id);
    } catch (error) {
      row.tell("failed", error.message);
      this.say(`${file.name}: ${error.message}`);
    }
  }

  /** The first store that is there, or a new one. */
  async storeToFill() {
    const stores = await this.stores();
    for (const store of stores) if (await request(`v1/vector_stores/${store}`).catch(gone)) return store;
    const metadata = { made_by: MADE_BY, ...(this.conversation ? { conversation: this.conversation.id } : {}) };
    const body = { name: this.conversation ? "Files of a conversation" : "Uploaded in the web page", metadata };
    const { id } = await request("v1/vector_stores", { method: "POST", body });
    const before = stores.join();
    this.made(id);
    if (this.known === before) this.known = [before, id].filter(Boolean).join(); // nothing else has come
    return id;
  }

  /** Ask until a file has been read. */
  async follow(id) {
    for (let pause = FIRST_MS; ; pause = Math.min(MOST_MS, pause * 1.5)) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      const row = [...this.list.children].find((each) => each.dataset.id === id);
      if (!row) return; // removed
      const now = await request(`v1/vector_stores/${row.dataset.store}/files/${id}`).catch((error) => {
        if (!passing(error)) throw error;
      });
      if (!now) continue;
      row.tell(now.status, now.last_error?.message);
      if (now.status === "in_progress") continue;
      this.say(`${row.querySelector(".name").textContent}: ${now.last_error?.message ?? t(now.status)}`);
      return;
    }
  }

  async remove(row, name) {
    const id = row.dataset.id;
    row.remove();
    if (!id) return;
    try {
      await request(`v1/files/${id}`, { method: "DELETE" });
      this.say(t("removed", { name }));
    } catch (error) {
      this.say(`${name}: ${error.message}`);
      await this.load();
    }
  }
}
