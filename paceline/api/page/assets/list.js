// The list of conversations: search, groups, and a menu for each with rename, pin, export and delete.

import { asJson, asMarkdown } from "./conversation.js";
import { icon, iconButton, make } from "./elements.js";
import { t } from "./text.js";

const DAY = 86_400_000; // ms

export function titled({ title }) {
  return title || t("newConversation");
}

export class ConversationList {
  /** list, search, menu: their elements. actions: {select, changed, remove}, each called with a conversation; `changed` also
   * with the fields and their new values; and `failed`, with an error. */
  constructor({ list, search, menu }, archive, actions) {
    Object.assign(this, { list, search, menu, archive, actions });
    this.current = null;
    this.rows = new WeakMap(); // by conversation
    search.oninput = () => this.show();
    menu.onclick = (event) => {
      const done = event.target.closest("button")?.dataset.do;
      if (!done) return;
      menu.hidePopover();
      this.act(done, this.chosen);
    };
  }

  show(current = this.current, writing = this.writing ?? new Map()) {
    Object.assign(this, { current, writing });
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.archive.conversations.filter((each) => !wanted || holds(each, wanted));
    const groups = new Map();
    const midnight = new Date().setHours(0, 0, 0, 0);
    for (const each of found.filter((one) => one.pinned).concat(found.filter((one) => !one.pinned))) {
      const age = each.updated >= midnight ? "today" : each.updated >= midnight - DAY ? "yesterday" : "earlier";
      const group = each.pinned ? "pinned" : age;
      groups.set(group, [...(groups.get(group) ?? []), this.row(each)]);
    }
    const parts = [...groups].map(([group, rows]) => make("section", {}, make("h2", { textContent: t(group) }), make("ul", {}, ...rows)));
    this.list.replaceChildren(...(parts.length || !wanted ? parts : [make("p", { className: "none", textContent: t("nothingFound") })]));
  }

  /** A row, made anew only when its words have changed. */
  row(conversation) {
    const title = titled(conversation);
    const words = `${document.documentElement.lang} ${title}`;
    let row = this.rows.get(conversation);
    if (row?.words !== words) {
      const open = make("button", { type: "button", className: "open", textContent: title, title, onclick: () => this.actions.select(conversation) });
      const more = iconButton("more", t("more", { title }), () => this.openMenu(conversation, more));
      more.classList.add("more");
      row = Object.assign(make("li", {}, open, more), { words });
      this.rows.set(conversation, row);
    }
    if (conversation.id === this.current?.id) row.firstChild.setAttribute("aria-current", "true");
    else row.firstChild.removeAttribute("aria-current");
    row.classList.toggle("writing", this.writing.has(conversation));
    return row;
  }

  openMenu(conversation, button) {
    this.chosen = conversation;
    const items = [
      ["rename", "edit"], [conversation.pinned ? "unpin" : "pin", "pin"], ["exportMarkdown", "download"], ["exportJson", "download"], ["delete", "trash"],
    ];
    this.menu.replaceChildren(...items.map(([name, shape]) => {
      const item = make("button", { type: "button" }, icon(shape), t(name));
      item.dataset.do = name;
      return item;
    }));
    this.menu.showPopover();
    const { left, bottom } = button.getBoundingClientRect();
    this.menu.style.left = `${Math.min(left, innerWidth - this.menu.offsetWidth - 8)}px`;
    this.menu.style.top = `${Math.min(bottom + 4, innerHeight - this.menu.offsetHeight - 8)}px`;
    this.menu.firstElementChild.focus();
  }

  async act(done, conversation) {
    if (done === "delete") return this.actions.remove(conversation);
    if (done.startsWith("export")) {
      try {
        if (conversation.away) await this.archive.fetch(conversation);
      } catch (error) {
        return this.actions.failed(error);
      }
      const words = { you: t("you"), answer: t("answer"), sources: t("sources") };
      if (done === "exportJson") save(`${titled(conversation)}.json`, asJson([conversation]), "application/json");
      else save(`${titled(conversation)}.md`, asMarkdown(conversation, words), "text/markdown");
      return undefined;
    }
    if (done === "rename") {
      const title = prompt(t("newTitle"), conversation.title)?.trim();
      if (!title) return undefined;
      return this.actions.changed(conversation, { title });
    }
    return this.actions.changed(conversation, { pinned: done === "pin" });
  }
}

function holds({ title, messages }, wanted) {
  return title.toLowerCase().includes(wanted) || messages.some(({ text }) => text.toLowerCase().includes(wanted));
}

/** Have the browser keep a file. */
export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name.replace(/[\\/:*?"<>|]/g, " ") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
