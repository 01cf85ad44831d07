// The documents that were uploaded here: files of this key, in one vector store of its own, which answers then read
// beside the documents of the server.

import { request, requestAll, upload } from "./api.js";
import { make } from "./answer.js";

const MADE_BY = "paceline page"; // in the store's metadata
const FIRST_MS = 150;
const MOST_MS = 2000;
const WORDS = { in_progress: "being read", completed: "ready", failed: "failed", cancelled: "cancelled" };

export class Documents {
  /** list: the element that shows them; say: is told what happens. */
  constructor(list, say) {
    this.list = list;
    this.say = say;
    this.store = ""; // its id, once it exists
    this.count = 0; // documents in it
    this.adding = 0; // uploads under way, whose rows are shown already
    this.loading = Promise.resolve();
  }

  /** Find the store, and show what is in it. Raises ApiError. */
  load() {
    if (this.adding) return this.loading;
    const loading = this.loading.catch(() => {}).then(() => this.fetch());
    this.loading = loading;
    return loading;
  }

  async fetch() {
    await this.find();
    if (!this.store) {
      this.count = 0;
      this.show([]);
      return;
    }
    const [held, files] = await Promise.all([requestAll(`v1/vector_stores/${this.store}/files`), requestAll("v1/files")]);
    const names = new Map(files.map((file) => [file.id, file.filename]));
    this.count = held.length;
    this.show(held.map((each) => ({ ...each, name: names.get(each.id) ?? each.id })));
    for (const each of held) if (each.status === "in_progress") this.follow(each.id).catch(({ message }) => this.say(message));
  }

  async find() {
    const stores = await requestAll("v1/vector_stores");
    this.store = stores.find((store) => store.metadata?.made_by === MADE_BY)?.id ?? "";
  }

  /** The store that answers read; empty where there is nothing to read. */
  get readable() {
    return this.count ? this.store : "";
  }

  show(entries) {
    this.list.replaceChildren(...entries.map((entry) => this.row(entry)));
  }

  row(entry) {
    const told = make("span", { className: "state" });
    const progress = make("progress", { max: 1, value: 0, hidden: true, ariaLabel: `Upload of ${entry.name}` });
    const remove = make("button", { type: "button", textContent: "Remove", ariaLabel: `Remove ${entry.name}` });
    const row = make("li", {}, make("span", { className: "name", textContent: entry.name, title: entry.name }), progress, told, remove);
    row.dataset.id = entry.id ?? "";
    row.tell = (state, reason = "") => {
      row.dataset.state = state;
      told.textContent = reason || WORDS[state] || state;
      progress.hidden = state !== "uploading";
      remove.hidden = state === "uploading";
    };
    row.progress = progress;
    remove.onclick = () => this.remove(row, entry.name);
    row.tell(entry.status, entry.last_error?.message);
    return row;
  }

  async add(files) {
    this.adding += 1;
    await this.loading.catch(() => {});
    for (const file of files) {
      const row = this.row({ name: file.name, status: "uploading" });
      this.list.append(row);
      try {
        const stored = await upload(file, (part) => (row.progress.value = part));
        row.dataset.id = stored.id;
        await this.makeStore();
        await request(`v1/vector_stores/${this.store}/files`, { method: "POST", body: { file_id: stored.id } });
        this.count += 1;
        row.tell("in_progress");
        await this.follow(stored.id);
      } catch (error) {
        row.tell("failed", error.message);
        this.say(`${file.name}: ${error.message}`);
      }
    }
    this.adding -= 1;
  }

  async makeStore() {
    if (this.store) return;
    await this.find(); // another tab may have made it meanwhile
    if (this.store) return;
    const body = { name: "Uploaded in the web page", metadata: { made_by: MADE_BY } };
    this.store = (await request("v1/vector_stores", { method: "POST", body })).id;
  }

  /** Ask until a file has been read. */
  async follow(id) {
    for (let pause = FIRST_MS; ; pause = Math.min(MOST_MS, pause * 1.5)) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      const row = [...this.list.children].find((each) => each.dataset.id === id);
      if (!row) return; // removed
      const now = await request(`v1/vector_stores/${this.store}/files/${id}`);
      row.tell(now.status, now.last_error?.message);
      if (now.status === "in_progress") continue;
      this.say(`${row.firstChild.textContent}: ${now.last_error?.message ?? WORDS[now.status]}`);
      return;
    }
  }

  async remove(row, name) {
    const id = row.dataset.id;
    row.remove();
    if (!id) return;
    try {
      await request(`v1/files/${id}`, { method: "DELETE" });
      this.count = Math.max(0, this.count - 1);
      this.say(`${name}: removed`);
    } catch (error) {
      this.say(`${name}: ${error.message}`);
      await this.load();
    }
  }
}
