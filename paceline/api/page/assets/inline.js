// Markdown within a line: emphasis, code, links. Builds DOM nodes; no text is ever read as HTML.
//
// Each search that fails is remembered, so that hostile text takes time in proportion to its length. Images are shown as
// links: a page that loaded them would tell another host what a private document says.

import { showFormula } from "./rich.js";
import { appendRun } from "./run.js";

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SAFE = new Set(["http:", "https:", "mailto:"]);
const MAX_DEPTH = 8;
const MAX_URL = 2048;
const MAX_FORMULA = 500; // characters
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}_]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`\\]{1,2048}/y;
const TRAILING = ".,;:!?*_~]"; // behind an address, not of it
const ESCAPED = /[!-/:-@[-`{-~]/;

/** The address if a reader may follow it, else null. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    // A name before the host, as in bank.example@elsewhere.example, is there to be taken for it.
    return SAFE.has(url.protocol) && !url.username && !url.password ? url.href : null;
  } catch {
    return null; // relative addresses as well: they would lead into this server
  }
}

export function appendInline(parent, run, depth = 0) {
  new Inline(run, depth).appendTo(parent);
}

class Inline {
  constructor(run, depth) {
    this.run = run;
    this.text = run.text;
    this.depth = depth;
    this.absent = new Set(); // marks that close nowhere further on
    this.bracket = -2; // the next "](", -1: none, -2: not looked for
    this.opener = -1; // the last "[" before it
    this.closers = null; // where each "(" is closed, once one is asked for
  }

  appendTo(parent) {
    let start = 0;
    let at = 0;
    const flush = (end) => {
      if (end > start) appendRun(parent, this.run.slice(start, end));
    };
    while (at < this.text.length) {
      const found = this.depth < MAX_DEPTH ? this.construct(at) : null;
      if (found === null) {
        at += 1;
        continue;
      }
      flush(at);
      found.append(parent);
      start = at = found.end;
    }
    flush(at);
  }

  /** What begins here: its end, and how to append it; null for plain text. */
  construct(at) {
    switch (this.text[at]) {
      case "\n":
        return { end: at + 1, append: (parent) => parent.append(document.createElement("br")) };
      case "$":
        return this.formula(at, "$", "$");
      case "\\":
        if (this.text[at + 1] === "(") return this.formula(at, "\\(", "\\)");
        return ESCAPED.test(this.text[at + 1] ?? "")
          ? { end: at + 2, append: (parent) => appendRun(parent, this.run.slice(at + 1, at + 2)) }
          : null;
      case "`":
        return this.code(at);
      case "*":
      case "_":
      case "~":
        return this.emphasis(at);
      case "!":
        return this.text[at + 1] === "[" ? this.link(at + 1) : null;
      case "[":
        return this.link(at);
      case "h":
        return this.address(at);
      default:
        return null;
    }
  }

  /** A formula on one line. A dollar before a digit or a space is money. */
  formula(at, opens, closes) {
    const from = at + opens.length;
    if (opens === "$" && !/[^\s$]/.test(this.text[from] ?? " ")) return null;
    const near = this.text.slice(from, from + MAX_FORMULA + closes.length); // further than that nothing is looked for
    const size = near.indexOf(closes);
    const source = near.slice(0, size);
    if (size < 1 || source.includes("\n")) return null;
    const end = from + size + closes.length;
    if (opens === "$" && (SPACE.test(source.at(-1)) || WORD.test(this.text[end] ?? ""))) return null;
    return { end, append: (parent) => parent.append(showFormula(document.createElement("span"), source, false)) };
  }

  code(at) {
    if (this.text[at - 1] === "`") return null; // counted already, from the first one on
    let size = 1;
    while (this.text[at + size] === "`") size += 1;
    const mark = "`".repeat(size);
    const key = `code${size}`;
    if (this.absent.has(key)) return null;
    let close = this.text.indexOf(mark, at + size);
    while (close !== -1 && (this.text[close + size] === "`" || this.text[close - 1] === "`")) {
      while (this.text[close] === "`") close += 1;
      close = this.text.indexOf(mark, close);
    }
    if (close === -1) {
      this.absent.add(key);
      return null;
    }
    return this.element("code", at + size, close, close + size, appendRun);
  }

  emphasis(at) {
    for (const [mark, name] of MARKS) {
      if (!this.text.startsWith(mark, at) || this.absent.has(mark)) continue;
      const from = at + mark.length;
      if (SPACE.test(this.text[from] ?? " ")) continue;
      if (mark[0] === "_" && WORD.test(this.text[at - 1] ?? "")) continue;
      const close = this.closing(mark, from + 1);
      if (close === -1) {
        this.absent.add(mark);
        continue;
      }
      return this.element(name, from, close, close + mark.length, this.deeper());
    }
    return null;
  }

  closing(mark, from) {
    const char = mark[0];
    for (let at = this.text.indexOf(mark, from); at !== -1; at = this.text.indexOf(mark, at + 1)) {
      const before = this.text[at - 1];
      const after = this.text[at + mark.length];
      if (SPACE.test(before) || before === "\\") continue;
      if (mark.length === 1 && (before === char || after === char)) continue;
      if (char === "_" && WORD.test(after ?? "")) continue;
      return at;
    }
    return -1;
  }

  link(at) {
    if (this.bracket !== -1 && this.bracket < at) {
      this.bracket = this.text.indexOf("](", at);
      this.opener = this.bracket === -1 ? -1 : this.text.lastIndexOf("[", this.bracket);
    }
    if (this.bracket === -1 || this.opener !== at) return null;
    const from = this.bracket + 2;
    this.closers ??= closers(this.text);
    const end = this.closers.get(from - 1) ?? Infinity;
    if (end - from >= MAX_URL) return null;
    const address = safeAddress(this.text.slice(from, end));
    if (address === null) return null; // shown as it was written
    return { end: end + 1, append: (parent) => parent.append(anchor(address, this.run.slice(at + 1, this.bracket), this.deeper())) };
  }

  address(at) {
    if (WORD.test(this.text[at - 1] ?? "")) return null;
    ADDRESS.lastIndex = at;
    const found = ADDRESS.exec(this.text);
    if (found === null) return null;
    const whole = found[0];
    const trailing = whole.includes("(") ? TRAILING : `${TRAILING})`;
    let size = whole.length;
    while (trailing.includes(whole[size - 1])) size -= 1;
    const shown = whole.slice(0, size);
    const address = safeAddress(shown);
    if (address === null) return null;
    const end = at + shown.length;
    return { end, append: (parent) => parent.append(anchor(address, this.run.slice(at, end), appendRun)) };
  }

  element(name, from, to, end, fill) {
    return {
      end,
      append: (parent) => {
        const made = document.createElement(name);
        fill(made, this.run.slice(from, to));
        parent.append(made);
      },
    };
  }

  deeper() {
    return (parent, run) => appendInline(parent, run, this.depth + 1);
  }
}

/** The index of the ")" of each "(" that has one, with no space between. */
function closers(text) {
  const found = new Map();
  let open = [];
  for (let at = 0; at < text.length; at += 1) {
    const char = text[at];
    if (char === "(") open.push(at);
    else if (char === ")" && open.length) found.set(open.pop(), at);
    else if (SPACE.test(char)) open = [];
  }
  return found;
}

function anchor(address, label, fill) {
  const made = document.createElement("a");
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.title = address; // whose text may name another one
  fill(made, label);
  if (!made.textContent) made.textContent = address;
  return made;
}
