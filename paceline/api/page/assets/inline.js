// Markdown within a line: emphasis, code, links. Builds DOM nodes; no text is ever read as HTML.
//
// Each search that fails is remembered, so that hostile text takes time in proportion to its length. Images are shown as
// links: a page that loaded them would tell another host what a private document says.

import { make } from "./elements.js";
import { showFormula } from "./rich.js";
import { appendRun, Run } from "./run.js";

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SAFE = new Set(["http:", "https:", "mailto:"]);
const MAX_DEPTH = 8;
const MAX_URL = 2048;
const MAX_FORMULA = 500; // characters
const SPACE = /\s/;
const WORD = /[\p{L}\p{N}_]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`\\]{1,2048}/y;
const TRAILING = ".,;:!?*_~]"; // behind an address, not of it
const PIECE = 1000; // characters of plain text that browsers shape together, at least: what grows is shaped anew
const CUT = / |\p{Script=Han}(?=\p{Script=Han})/gu; // where a line may end in any case
const ESCAPED = /[!-/:-@[-`{-~]/;

/** The address if a reader may follow it, else null. */
export function safeAddress(text) {
  if (!URL.canParse(text)) return null; // relative addresses as well: they would lead into this server
  const url = new URL(text);
  // A name before the host, as in bank.example@elsewhere.example, is there to be taken for it.
  return SAFE.has(url.protocol) && !url.username && !url.password ? url.href : null;
}

/** Show a run in an element without other content. What it showed before and is still read alike keeps its nodes. */
export function showInline(parent, run) {
  const parts = new Inline(run, 0).parts();
  const held = parent.run && run.startsWith(parent.run) ? parent.parts : [];
  if (!held.length) parent.replaceChildren();
  for (const [at, part] of parts.entries()) {
    const { name, end, plain, before = parent.lastChild } = held[at] ?? {};
    part.before = before;
    if (name === part.name && end === part.end) continue;
    if (plain && part.plain?.startsWith(plain) && at === held.length - 1) {
      appendRun(parent, part.plain.slice(plain.length));
      continue;
    }
    while (parent.lastChild !== before) parent.lastChild.remove();
    held.length = Math.min(held.length, at);
    part.append(parent);
  }
  Object.assign(parent, { run, parts });
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

  /** What the run is read as, in order: see `construct`; plain text as {plain, end, append}, never two beside each other. */
  parts() {
    const parts = [];
    let plain = [];
    let start = 0;
    let at = 0;
    const flush = () => {
      const run = Run.join([...plain, this.run.slice(start, at)], "");
      const begin = parts.at(-1)?.end ?? 0;
      const push = (piece, end) => parts.push({ plain: piece, end, append: (parent) => appendRun(parent, piece) });
      let from = 0;
      for (CUT.lastIndex = PIECE; CUT.test(run.text) && CUT.lastIndex < run.length; CUT.lastIndex += PIECE) {
        push(run.slice(from, CUT.lastIndex), begin + CUT.lastIndex);
        from = CUT.lastIndex;
        parts.push(this.element("wbr", 0, 0, begin + from, () => {}));
      }
      if (from < run.length) push(run.slice(from, run.length), at);
      plain = [];
    };
    while (at < this.text.length) {
      const found = this.depth < MAX_DEPTH ? this.construct(at) : null;
      if (found === null) {
        at += 1;
      } else if (found.append) {
        flush();
        parts.push(found);
        start = at = found.end;
      } else {
        plain.push(this.run.slice(start, at));
        start = at + 1;
        at = found.end;
      }
    }
    flush();
    return parts;
  }

  /** What begins here as {name, end, append}, an escaped character as {end}; null for plain text. */
  construct(at) {
    switch (this.text[at]) {
      case "\n":
        return this.element("br", at, at, at + 1, () => {});
      case "$":
        return this.formula(at, "$", "$");
      case "\\":
        if (this.text[at + 1] === "(") return this.formula(at, "\\(", "\\)");
        return ESCAPED.test(this.text[at + 1] ?? "") ? { end: at + 2 } : null;
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
    return { name: "formula", end, append: (parent) => parent.append(showFormula(make("span"), source, false)) };
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
    const label = this.run.slice(at + 1, this.bracket);
    return { name: "a", end: end + 1, append: (parent) => parent.append(anchor(address, label, this.deeper())) };
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
    return { name: "a", end, append: (parent) => parent.append(anchor(address, this.run.slice(at, end), appendRun)) };
  }

  element(name, from, to, end, fill) {
    return {
      name,
      end,
      append: (parent) => {
        const made = make(name);
        fill(made, this.run.slice(from, to));
        parent.append(made);
      },
    };
  }

  deeper() {
    return (parent, run) => new Inline(run, this.depth + 1).parts().forEach((part) => part.append(parent));
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
  const made = make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
  made.title = address; // whose text may name another one
  fill(made, label);
  if (!made.textContent) made.textContent = address;
  return made;
}
