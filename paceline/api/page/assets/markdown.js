// Markdown in blocks: paragraphs, headings, lists, quotes, fenced code, tables. A subset of CommonMark and of GitHub's
// tables, without HTML. A block that has not changed keeps its nodes, so that an answer can be rendered as it arrives.

import { appendInline } from "./inline.js";
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
const MAX_BLOCK = 20_000; // characters: a longer one is shown as it was written
const MAX_PARAGRAPH = 8000; // likewise: it is made anew each time it grows
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
 * Make the children of a node these parts, {run, build, kind, fill}: one whose run is the same stays as it is, and one of the
 * same kind is filled anew, if `fill` can; it makes the node that `build` would. until: 0 gives it the budget from what is
 * built first on. False: not all could be built in time.
 */
function follow(parent, parts, until = Infinity) {
  let whole = true;
  let shown = parent.firstElementChild;
  for (const { run, build, kind, fill } of parts) {
    const next = shown?.nextElementSibling;
    const source = `${run.text}\u0000${run.lanes}`;
    if (shown?.source !== source) {
      until ||= performance.now() + BUDGET_MS;
      const late = until < Infinity && performance.now() > until;
      const filled = !late && kind !== undefined && shown?.kind === kind && fill(shown);
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

/** A part that is filled with parts, in a node of its own. */
function filledWith(kind, make, parts) {
  const fill = (node) => {
    follow(node, parts());
    return true;
  };
  return { kind, fill, build: () => {
    const node = make();
    fill(node);
    return node;
  } };
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
  return filledWith("written", () => Object.assign(document.createElement("div"), { className: "as-written" }),
    () => pieces.map((piece) => ({ run: piece, build: () => element("div", piece, appendRun) })));
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
    const content = lines[at].slice(heading[0].length).trim();
    // An answer lies below the page's own headings.
    return { end: at + 1, build: () => element(`h${Math.min(6, heading[1].length + 2)}`, content) };
  }
  const formula = FORMULA.exec(text);
  if (formula) {
    const found = displayed(lines, at, formula);
    if (found) return found;
  }
  if (isRule(text)) return { end: at + 1, build: () => document.createElement("hr") };
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

function element(name, run, inline = appendInline) {
  const made = document.createElement(name);
  inline(made, run);
  return made;
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end].text) && !begins(lines, end, depth)) end += 1;
  const content = Run.join(lines.slice(at, end).map((line) => line.trim()));
  return { end, ...(content.length > MAX_PARAGRAPH ? written(content) : { build: () => element("p", content) }) };
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
  if (!content.text.startsWith(code.run.text) || !content.lanes.startsWith(code.run.lanes)) return false;
  appendRun(code, content.slice(code.run.length));
  code.run = content;
  figure.querySelector("button").dataset.copy = content.text;
  return true;
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
    return { end: end + 1, build: () => showFormula(document.createElement("div"), source, true) };
  }
  return null;
}

function codeBlock(content, language, closed) {
  const figure = document.createElement("figure");
  figure.className = "code";
  const bar = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "text";
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // scrolled with the keyboard
  const code = Object.assign(element("code", content, appendRun), { run: content });
  bar.append(name, copyButton(content.text));
  pre.append(code);
  figure.append(bar, pre);
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
  return { end, ...filledWith("quote", () => document.createElement("blockquote"), () => partsOf(inner, parseBlocks(inner, depth + 1))) };
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
  const make = () => Object.assign(document.createElement(ordered ? "ol" : "ul"), ordered && first !== 1 ? { start: first } : {});
  return { end, ...filledWith(`list ${ordered} ${first}`, make, () => items.map((item) => ({ run: Run.join(item.lines), build: () => itemNode(item, depth) }))) };
}

function indentOf(text) {
  return text.length - text.trimStart().length;
}

function itemNode({ lines }, depth) {
  const node = document.createElement("li");
  for (const block of parseBlocks(lines, depth + 1)) node.append(block.build());
  const only = node.firstElementChild;
  if (only?.tagName === "P") only.replaceWith(...only.childNodes); // tight
  return node;
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
  const row = (name, line) => {
    const made = document.createElement("tr");
    const given = cells(line).slice(0, head.length);
    given.forEach((content, index) => {
      const cell = element(name, content);
      cell.className = `align-${sides[index]}`;
      made.append(cell);
    });
    // One for all that are missing: short rows below many columns would be a page of cells for each of their bytes.
    if (given.length < head.length) made.insertCell().colSpan = head.length - given.length;
    return made;
  };
  const rows = filledWith("rows", () => document.createElement("tbody"), () => lines.slice(at + 2, end).map((run) => ({ run, build: () => row("td", run) })));
  const build = () => {
    const made = document.createElement("table");
    made.createTHead().append(row("th", lines[at]));
    made.append(rows.build());
    const frame = Object.assign(document.createElement("div"), { className: "table", tabIndex: 0 });
    frame.append(made);
    return frame;
  };
  const top = Run.join(lines.slice(at, at + 2));
  return { end, build, kind: `table ${top.text} ${top.lanes}`, fill: (frame) => rows.fill(frame.querySelector("tbody")) };
}
