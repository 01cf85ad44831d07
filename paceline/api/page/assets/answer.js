// A question or an answer on the screen, with its sources, its notes, how it was written, and what may be done with it.

import { request } from "./api.js";
import { icon, iconButton, legible, make, short } from "./elements.js";
import { renderMarkdown } from "./markdown.js";
import { copyButton, voiceButton } from "./rich.js";
import { appendRun, NONE, Run } from "./run.js";
import { t } from "./text.js";
import { pace, timeline } from "./timeline.js";

const LOST = ["lost", "missing", "refused"];
const DEGRADED = new Set([...["device", "cloud"].flatMap((side) => LOST.map((how) => `${side}_${how}`)), "workflow_incomplete"]);

/** versions: see `versionsBar`. edited: is called with a new text, in place of this one. */
export function questionNode({ text }, versions, edited) {
  const words = make("div", { className: "words", textContent: text });
  const bar = make("div", { className: "actions" }, ...versions, iconButton("edit", t("edit"), edit), copyButton(text));
  const node = make("article", { className: "message question", ariaLabel: t("you") }, words, bar);
  function edit() {
    const field = make("textarea", { value: text, ariaLabel: t("edit"), rows: Math.min(12, text.split("\n").length + 1) });
    const form = make("form", { className: "editing" }, field, make("div", { className: "row end" },
      make("button", { type: "button", textContent: t("cancel"), onclick: close }),
      make("button", { type: "submit", className: "primary", textContent: t("saveAndAsk") })));
    form.onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) edited(field.value.trim());
    };
    field.onkeydown = (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    };
    function close() {
      form.replaceWith(words, bar);
    }
    words.remove();
    bar.replaceWith(form);
    field.focus();
  }
  return node;
}

/** Buttons to the other versions of a message, where there are any. turn: is called with the one to show. */
export function versionsBar(versions, message, turn) {
  if (versions.length < 2) return [];
  const at = versions.indexOf(message);
  const before = iconButton("left", t("before"), () => turn(versions[at - 1]));
  const after = iconButton("right", t("after"), () => turn(versions[at + 1]));
  before.disabled = at === 0;
  after.disabled = at === versions.length - 1;
  const told = make("span", { className: "version", textContent: `${at + 1}/${versions.length}`, title: t("other", { at: at + 1, count: versions.length }) });
  return [make("span", { className: "versions" }, before, told, after)];
}

const unfinished = new Set(); // views that are to be drawn on
const FRAME_MS = 15; // of each frame, for that

function drawOn() {
  const end = performance.now() + FRAME_MS;
  for (const view of unfinished) {
    if (!view.node.isConnected || view.update()) unfinished.delete(view);
    if (performance.now() > end) break;
  }
  if (unfinished.size) requestAnimationFrame(drawOn);
}

/** An answer whose node follows it: `show` or `update` after each change. actions: {retry, readOn, goOn, openSource, versions}. */
export class AnswerView {
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.words = make("div", { className: "words" });
    this.folded = make("div", { className: "folded" });
    this.notes = make("div", { className: "notes" });
    this.node = make("article", { className: "message answer", ariaLabel: t("answer") }, this.folded, this.words, this.notes);
  }

  /** Draw what can be until then, and the rest in later frames. */
  show(until) {
    if (this.update(until) || unfinished.has(this)) return;
    if (unfinished.add(this).size === 1) requestAnimationFrame(drawOn);
  }

  /** False: it took too long to draw all of it, and is to be called again. */
  update(until) {
    const { text, lanes, state } = this.answer;
    this.node.setAttribute("aria-busy", String(state === "writing"));
    this.node.dataset.state = state;
    const whole = renderMarkdown(this.words, new Run(text, lanes.length === text.length ? lanes : NONE.repeat(text.length)), until);
    this.fold();
    if (state !== "writing") this.notes.replaceChildren(...this.ending());
    return whole;
  }

  /** What came before the answer: steps of a workflow, calls, what the model thought. */
  fold() {
    const { thought, steps = [], calls = [], text } = this.answer;
    const parts = [
      ["steps", steps.length > 0, () => make("ol", {}, ...steps.map((step) => make("li", { textContent: step })))],
      ["thought", Boolean(thought), (shown) => grown(shown, thought)],
      ["calls", calls.length > 0, () => make("ol", {}, ...calls.map((call) => make("li", {}, `${t("called", call)} `, make("code", { textContent: call.arguments }))))],
    ];
    for (const [kind, there, made] of parts) {
      if (!there) continue;
      let node = this.folded.querySelector(`.${kind}`);
      if (!node) {
        const title = make("summary", { textContent: kind === "calls" ? t("called", calls[0]) : t(kind) });
        node = this.folded.appendChild(make("details", { className: `fold ${kind}`, open: kind === "thought" && !text }, title));
        node.touched = false;
        title.onclick = () => (node.touched = true);
      }
      const content = made(node.children[1]);
      if (content !== node.children[1]) node.replaceChildren(node.firstElementChild, content);
      if (kind === "thought" && text && !node.touched) node.open = false; // folded when the answer begins
    }
  }

  *ending() {
    const { answer } = this;
    const citations = Array.isArray(answer.report?.citations) ? answer.report.citations : [];
    if (citations.length) yield this.sources(citations);
    for (const sentence of sentences(answer)) yield make("p", { className: "note", textContent: sentence });
    for (const waiting of answer.report?.confirmation_needed ?? []) yield confirmation(waiting, () => this.actions.retry(answer));
    if (answer.state === "unread") {
      yield make("p", { className: "error", role: "alert", textContent: answer.error });
      yield make("button", { type: "button", className: "on", textContent: t("again"), onclick: () => this.actions.readOn(answer) });
    } else if (answer.text && (answer.finish === "length" || answer.state !== "done")) {
      yield make("button", { type: "button", className: "on", textContent: t("goOn"), onclick: () => this.actions.goOn(answer) });
    }
    if (answer.state === "failed") yield make("p", { className: "error", role: "alert", textContent: answer.error || t("failed") });
    if (/[cd]/.test(answer.lanes)) yield sharesBar(answer.lanes);
    const bar = make("div", { className: "actions" }, ...this.actions.versions(answer));
    if (answer.text) bar.append(copyButton(answer.text), ...voiceButton(() => this.words.innerText));
    bar.append(iconButton("retry", t("retry"), () => this.actions.retry(answer)));
    const told = summary(answer);
    if (answer.report?.strategy) yield make("div", { className: "foot" }, written(answer, told), bar);
    else yield make("div", { className: "foot" }, make("span", { className: "summary", textContent: told }), bar);
  }

  sources(citations) {
    const items = citations.map((citation, index) => {
      const side = citation.side === "device" ? "device" : "cloud";
      const name = legible(citation.document || t("privateDocument"));
      const open = () => this.actions.openSource({ ...citation, document: name }, this.answer);
      const where = make("span", { className: "side", textContent: citation.side === "web" ? "web" : t(side) });
      const number = make("span", { className: "number", textContent: index + 1 });
      return make("li", {}, make("button", { type: "button", className: `source ${side}`, onclick: open }, number, make("span", { className: "name", textContent: name }), where));
    });
    return make("ul", { className: "sources", ariaLabel: t("sources") }, ...items);
  }
}

/** The paragraph of what a model thinks, of which browsers lay out what has come since. */
function grown(shown, thought) {
  const node = shown ?? make("p", { className: "thought" });
  appendRun(node, new Run(thought.slice(node.textContent.length)));
  return node;
}

function* sentences({ state, finish, report, response }) {
  if (report?.degraded) {
    const why = String(report.degraded).endsWith("_refused") && report.why ? ` (${report.why})` : "";
    yield (DEGRADED.has(report.degraded) ? t(report.degraded) : String(report.degraded)) + why;
  }
  if (finish === "length") yield t("cutLimit");
  if (state === "stopped") yield t("stopped");
  if (state === "cut") yield t(response ? "cutGone" : "cutHere");
}

/** A document that was not read, with a button by which its owner confirms it; without the right, how that is done. */
function confirmation({ id, document: name }, retry) {
  const note = make("p", { className: "note", textContent: `${t("asksFor", { name: legible(name) })} ` });
  const confirm = async () => {
    try {
      await request("v1/policy/confirmations", { method: "POST", body: { document: id } });
      retry();
    } catch (error) {
      note.textContent = error.message;
    }
  };
  note.append(make("button", { type: "button", textContent: t("confirmReading"), onclick: confirm }));
  return note;
}

/** Whose documents decided how much of an answer, as a bar whose parts add to 100. */
function sharesBar(lanes) {
  const counts = [["cloud", "c"], ["device", "d"], ["neither", NONE]].map(([side, lane]) => [side, lanes.split(lane).length - 1]);
  const shares = counts.map(([side, count]) => [side, Math.floor((100 * count) / lanes.length)]);
  const most = counts.reduce((best, [, count], index) => (count > counts[best][1] ? index : best), 0);
  shares[most][1] += 100 - shares.reduce((sum, [, share]) => sum + share, 0);
  const some = shares.filter(([, share]) => share);
  const parts = some.map(([side, share]) => {
    const part = make("span", { className: side });
    part.style.flexGrow = share;
    return part;
  });
  const told = some.map(([side, share]) => make("span", { className: side, textContent: t("share", { side: t(side), share }) }));
  return make("div", { className: "shares" }, make("span", { className: "bar", ariaHidden: "true" }, ...parts), ...told);
}

/** What the report says of the writing, unfolded under an answer: what was chosen and why, and the timeline. */
function written({ report }, told) {
  const facts = [[t("strategy"), report.strategy], [t("why"), report.why]];
  const list = make("dl", {}, ...facts.filter(([, value]) => value).flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]));
  const title = make("summary", { title: t("written") }, make("span", { className: "summary", textContent: told }), icon("right"));
  const details = make("details", { className: "written" }, title, list);
  details.addEventListener("toggle", () => details.append(timeline(report)), { once: true });
  return details;
}

function summary({ report, usage, seconds, model, context }) {
  const parts = model ? [model.split("/").at(-1)] : [];
  if (report?.strategy) parts.push(report.strategy);
  if (usage) parts.push(t("tokens", { count: usage.output_tokens ?? usage.completion_tokens }));
  const rate = pace(report) || (usage?.output_tokens > 4 && seconds > 0.05 && usage.output_tokens / seconds);
  if (rate) parts.push(t("rate", { rate: short(rate) }));
  if (usage?.total_tokens && context) parts.push(t("context", { share: Math.ceil((100 * usage.total_tokens) / context), context }));
  return parts.join(" · ");
}
