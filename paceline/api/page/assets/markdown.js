// Markdown in blocks: paragraphs, headings, lists, quotes, fenced code, tables. A subset of CommonMark and of GitHub's
// tables, without HTML. A block that has not changed keeps its nodes, so that an answer can be rendered as it arrives.

import { make } from "./elements.js";
import { showInline } from "./inline.js";
import { colourCode, copyButton, showFormula } from "./rich.js";
import { appendRun, Run } from "./run.js";

// Each repetition goes on to its end or fails: one that gave characters back would try them all again.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))[ \t]*(?![ \t])([^`\s]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]|$)/;
const QUOTE = /^ {0,3}>[ ]?/;
const BLANK = /^[ \t]*$/;
const DASHES = /^:?-+:?$/;
const MAX_DEPTH = 8;
const MAX_COLUMNS = 64;
const RENDERED = /\.(md|markdown|html?|xhtml|docx|pptx|epub)$/i;
const BUDGET_MS = 30; // of one rendering
const MAX_BLOCK = 32_000; // characters: a longer one is shown as it was written
const MAX_BLOCKS = 1500; // what comes after them is one more, shown so if it is long
const PIECE = 1500; // characters of such a one that are laid out together
const MAX_FORMULA = 30; // lines
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const FORMULA_ENDS = { "$$": "$$", "\\[": "\\]" };

/**
 * Show a run in a container. Raises nothing: every text is some Markdown. What takes longer than the budget, or than `until`,
 * is shown as it was written; false then, and a later rendering goes on there.
 */
export function renderMarkdown(container, run, until = 0) {
  const lines = run.lines();
  const blocks = parseBlocks(lines, 0, MAX_BLOCKS);
  const rest = blocks.at(-1)?.end ?? 0;
  if (blocks.length === MAX_BLOCKS && rest < lines.length) blocks.push({ start: rest, end: lines.length });
  return follow(container, partsOf(lines, blocks), until);
}

/**
 * Make the children of a node, from `first` on, these parts, {run, build, kind, fill}: one whose run is the same stays as it is,
 * and one of the same kind is filled anew, unless `fill` says false; it makes the node that `build` would. until: 0 gives it
 * the budget from what is built first on. False: not all could be built in time.
 */
function follow(parent, parts, until = Infinity, first = parent.firstElementChild) {
  let whole = true;
  let shown = first;
  for (const { run, build, kind, fill } of parts) {
    const next = shown?.nextElementSibling;
    const source = `${kind}\u0000${run.text}\u0000${run.lanes}`;
    if (shown?.source !== source) {
      until ||= performance.now() + BUDGET_MS;
      const late = until < Infinity && performance.now() > until;
      const filled = !late && kind !== undefined && shown?.kind === kind && fill(shown) !== false;
      const node = filled ? shown : late ? written(run).build() : build();
      if (late) whole = false;
      else Object.assign(node, { source, kind });
      if (!shown) parent.append(node);
      else if (!filled) shown.replaceWith(node);
    }
    shown = next;
  }
  for (let next = shown; shown; shown = next) {
    next = shown.nextElementSibling;
    shown.remove();
  }
  return whole;
}

/** A part that is an element, which `fill` fills. */
function filled(name, fill, kind = name, attributes = {}) {
  return { kind, fill, build: () => {
    const node = make(name, attributes);
    fill(node);
    return node;
  } };
}

/** A part that is an element with words. */
function words(name, run, attributes) {
  return { run, ...filled(name, (node) => showInline(node, run), name, attributes) };
}

function partsOf(lines, blocks) {
  return blocks.map(({ start, end, ...part }) => {
    const run = Run.join(lines.slice(start, end));
    return { run, ...(part.build && run.length <= MAX_BLOCK ? part : written(run)) };
  });
}

/** Show a text of a document of this name: rendered where it holds Markdown, as the parsers write it; else as it is. */
export function renderDocument(container, name, text) {
  if (RENDERED.test(name)) return renderMarkdown(container, new Run(text));
  container.classList.add("as-written");
  container.textContent = text;
}

/** A long text in pieces, of which browsers lay out those that are seen. */
function written(run) {
  const pieces = Array.from({ length: Math.ceil(run.length / PIECE) }, (_, at) => run.slice(at * PIECE, (at + 1) * PIECE));
  const parts = pieces.map((piece) => ({ run: piece, build: () => element("div", piece) }));
  return filled("div", (node) => follow(node, parts), "written", { className: "as-written" });
}

/** Blocks as {start, end, …}: their lines, and how to make their node (see `follow`). */
function parseBlocks(lines, depth, most = Infinity) {
  const blocks = [];
  let at = 0;
  while (at < lines.length && blocks.length < most) {
    if (BLANK.test(lines[at].text)) {
      at += 1;
      continue;
    }
    const block = parseBlock(lines, at, depth);
    blocks.push({ start: at, ...block });
    at = block.end;
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const text = lines[at].text;
  const fence = FENCE.exec(text);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(text);
  if (heading) {
    // An answer lies below the page's own headings.
    return { end: at + 1, ...words(`h${Math.min(6, heading[1].length + 2)}`, lines[at].slice(heading[0].length).trim()) };
  }
  const formula = FORMULA.exec(text);
  if (formula) {
    const found = displayed(lines, at, formula);
    if (found) return found;
  }
  if (isRule(text)) return { end: at + 1, build: () => make("hr") };
  if (depth < MAX_DEPTH && QUOTE.test(text)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(text)) return list(lines, at, depth);
  return table(lines, at) ?? paragraph(lines, at, depth);
}

function isRule(text) {
  const bare = text.replaceAll(" ", "").replaceAll("\t", "");
  return bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
}

function begins(lines, at, depth) {
  const text = lines[at].text;
  const nested = depth < MAX_DEPTH && (QUOTE.test(text) || ITEM.test(text));
  return nested || FENCE.test(text) || FORMULA.test(text) || HEADING.test(text) || isRule(text) || isTable(lines, at);
}

function element(name, run) {
  const made = make(name);
  appendRun(made, run);
  return made;
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end].text) && !begins(lines, end, depth)) end += 1;
  return { end, ...words("p", Run.join(lines.slice(at, end).map((line) => line.trim()))) };
}

function fenced(lines, at, fence) {
  let end = at + 1;
  const closes = (text) => {
    const bare = text.trim();
    return bare.length >= fence[1].length && bare === fence[1][0].repeat(bare.length);
  };
  while (end < lines.length && !closes(lines[end].text)) end += 1;
  const content = Run.join(lines.slice(at + 1, end));
  const closed = end < lines.length;
  const open = closed ? {} : { kind: `code ${fence[2]}`, fill: (figure) => growCode(figure, content) };
  return { end: Math.min(lines.length, end + 1), build: () => codeBlock(content, fence[2], closed), ...open };
}

/** Bring code that is still being written up to date, if it has only grown. */
function growCode(figure, content) {
  const code = figure.querySelector("code");
  if (!content.startsWith(code.run)) return false;
  appendRun(code, content.slice(code.run.length));
  code.run = content;
  figure.querySelector("button").dataset.copy = content.text;
}

/** A formula of its own lines, where it ends. */
function displayed(lines, at, formula) {
  const closes = FORMULA_ENDS[formula[1]];
  for (let end = at; end < Math.min(lines.length, at + MAX_FORMULA) && !BLANK.test(lines[end].text); end += 1) {
    const from = end === at ? formula[0].length : 0;
    const close = lines[end].text.indexOf(closes, from);
    if (close === -1) continue;
    if (!BLANK.test(lines[end].text.slice(close + closes.length))) return null; // text goes on behind it
    const source = Run.join(lines.slice(at, end + 1)).text.trim().slice(formula[1].length, -closes.length);
    return { end: end + 1, build: () => showFormula(make("div"), source, true) };
  }
  return null;
}

function codeBlock(content, language, closed) {
  const code = Object.assign(element("code", content), { run: content });
  const bar = make("figcaption", {}, make("span", { textContent: language || "text" }), copyButton(content.text));
  const figure = make("figure", { className: "code" }, bar, make("pre", { tabIndex: 0 }, code)); // scrolled with the keyboard
  if (language && closed) colourCode(code, content, language);
  return figure;
}

function quote(lines, at, depth) {
  let end = at;
  const inner = [];
  while (end < lines.length && QUOTE.test(lines[end].text)) {
    inner.push(lines[end].slice(QUOTE.exec(lines[end].text)[0].length));
    end += 1;
  }
  return { end, ...filled("blockquote", (node) => follow(node, partsOf(inner, parseBlocks(inner, depth + 1)))) };
}

function list(lines, at, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[at].text)[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const text = lines[end].text;
    const marker = ITEM.exec(text);
    const beside = marker && marker[1].length < (items.at(-1)?.base ?? marker[1].length) + 2; // further in, it is the item's own list
    if (beside && !isRule(text) && /\d/.test(marker[2]) === ordered) {
      items.push({ base: marker[1].length, indent: marker[0].length, lines: [lines[end].slice(marker[0].length)] });
    } else if (BLANK.test(text)) {
      const next = lines[end + 1]?.text ?? "";
      if (BLANK.test(next) || !(ITEM.test(next) || indentOf(next) >= 2)) break;
      items.at(-1).lines.push(lines[end]);
    } else if (indentOf(text) >= 2) {
      const item = items.at(-1);
      item.lines.push(lines[end].slice(Math.min(indentOf(text), item.indent)));
    } else if (!begins(lines, end, depth) && !BLANK.test(lines[end - 1].text)) {
      items.at(-1).lines.push(lines[end]); // a paragraph that goes on without its indentation
    } else {
      break;
    }
    end += 1;
  }
  const first = Number.parseInt(ITEM.exec(lines[at].text)[2], 10);
  const fill = (node) => follow(node, items.map((item) => ({ run: Run.join(item.lines), ...filled("li", (li) => fillItem(li, item.lines, depth)) })));
  return { end, ...filled(ordered ? "ol" : "ul", fill, `list ${ordered} ${first}`, ordered && first !== 1 ? { start: first } : {}) };
}

function indentOf(text) {
  return text.length - text.trimStart().length;
}

/** Fill an item: the words of its first paragraph without an element of their own, then its other blocks. */
function fillItem(node, lines, depth) {
  const blocks = parseBlocks(lines, depth + 1);
  const tight = blocks[0]?.kind === "p" ? blocks.shift().run : new Run("");
  const below = node.children[node.children.length - (node.blocks ?? 0)];
  if (below && !(tight.startsWith(node.run) && node.run.startsWith(tight))) return false;
  if (!below) showInline(node, tight);
  follow(node, partsOf(lines, blocks), Infinity, below ?? null);
  node.blocks = blocks.length;
}

function cells(line) {
  const trimmed = line.trim();
  const from = trimmed.text.startsWith("|") ? 1 : 0;
  const found = [];
  let start = from;
  for (let at = from; at < trimmed.length && found.length < MAX_COLUMNS; at += 1) {
    if (trimmed.text[at] !== "|" || trimmed.text[at - 1] === "\\") continue;
    found.push(trimmed.slice(start, at).trim());
    start = at + 1;
  }
  if (start < trimmed.length) found.push(trimmed.slice(start).trim());
  return found;
}

function isTable(lines, at) {
  if (!lines[at].text.includes("|") || !lines[at + 1]?.text.includes("-")) return false;
  const rule = cells(lines[at + 1]);
  return rule.every((cell) => DASHES.test(cell.text)) && rule.length === cells(lines[at]).length;
}

function table(lines, at) {
  if (!isTable(lines, at)) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].text.includes("|")) end += 1;
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map(({ text }) => (text.endsWith(":") ? (text.startsWith(":") ? "middle" : "right") : "left"));
  const row = (name, run) => ({ run, ...filled("tr", (node) => {
    const given = cells(run).slice(0, head.length).map((content, index) => words(name, content, { className: `align-${sides[index]}` }));
    const missing = head.length - given.length;
    // One for all that are missing: short rows below many columns would be a page of cells for each of their bytes.
    if (missing) given.push({ ...words("td", new Run(""), { colSpan: missing }), kind: `missing ${missing}` });
    follow(node, given);
  }) });
  const rows = filled("tbody", (node) => follow(node, lines.slice(at + 2, end).map((run) => row("td", run))));
  const build = () => {
    const made = make("table");
    made.createTHead().append(row("th", lines[at]).build());
    made.append(rows.build());
    return make("div", { className: "table", tabIndex: 0 }, made);
  };
  const top = Run.join(lines.slice(at, at + 2));
  return { end, build, kind: `table ${top.text} ${top.lanes}`, fill: (frame) => rows.fill(frame.querySelector("tbody")) };
}
