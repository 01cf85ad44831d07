// A question or an answer on the screen, with its sources, its notes and what may be done with it.

import { renderMarkdown } from "./markdown.js";
import { Run, NONE } from "./run.js";

const DEGRADED = {
  device_lost: "The device was lost in mid-answer; the cloud went on alone.",
  cloud_lost: "The cloud was lost in mid-answer; the device went on alone.",
  device_missing: "No device took part.",
  cloud_missing: "The cloud took no part.",
  device_refused: "The device refused to take part.",
  cloud_refused: "The cloud refused to take part.",
  workflow_incomplete: "Stages of the workflow were left out.",
};
const TURNING = /[\u202a-\u202e\u2066-\u2069]/g; // by them a name would be read backwards, and the side after it
const PRIVATE = "private document"; // of a device, whose name is not told to others

export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function questionNode(text) {
  return make("article", { className: "message question", ariaLabel: "You" }, make("div", { className: "words", textContent: text }));
}

/** An answer whose node follows it: `update` after each change. actions: {retry, openSource}. */
export class AnswerView {
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.words = make("div", { className: "words" });
    this.steps = make("details", { className: "steps", hidden: true }, make("summary", { textContent: "Steps" }), make("ol"));
    this.notes = make("div", { className: "notes" });
    this.node = make("article", { className: "message answer", ariaLabel: "Answer" }, this.steps, this.words, this.notes);
    this.update();
  }

  update() {
    const { text, lanes, state, thought } = this.answer;
    const steps = [...(this.answer.steps ?? []), ...(thought ? [thought] : [])];
    this.node.setAttribute("aria-busy", String(state === "writing"));
    this.node.dataset.state = state;
    renderMarkdown(this.words, new Run(text, lanes.length === text.length ? lanes : NONE.repeat(text.length)));
    if (steps.length) {
      this.steps.hidden = false;
      this.steps.lastElementChild.replaceChildren(...steps.map((step) => make("li", { textContent: step })));
    }
    if (state !== "writing") this.notes.replaceChildren(...this.ending());
  }

  *ending() {
    const { answer } = this;
    const citations = Array.isArray(answer.report?.citations) ? answer.report.citations : [];
    if (citations.length) yield this.sources(citations);
    for (const sentence of sentences(answer)) yield make("p", { className: "note", textContent: sentence });
    if (answer.state === "failed") yield make("p", { className: "error", role: "alert", textContent: answer.error });
    const bar = make("div", { className: "actions" });
    bar.append(make("button", { type: "button", textContent: "Retry", onclick: () => this.actions.retry(answer) }));
    if (answer.text) bar.append(copyButton(answer.text));
    if (/[cd]/.test(answer.lanes)) bar.append(sharesBar(answer.lanes));
    const told = summary(answer);
    if (told) bar.append(make("span", { className: "summary", textContent: told, title: answer.report?.why ?? "" }));
    yield bar;
  }

  sources(citations) {
    const items = citations.map((citation, index) => {
      const side = citation.side === "device" ? "device" : "cloud";
      const name = String(citation.document || PRIVATE).replace(TURNING, " ");
      const open = () => this.actions.openSource({ ...citation, document: name, side });
      const where = make("span", { className: "side", textContent: side });
      return make("li", {}, make("button", { type: "button", className: `source ${side}`, onclick: open }, `${index + 1}  ${name}`, where));
    });
    return make("ul", { className: "sources", ariaLabel: "Sources" }, ...items);
  }
}

function copyButton(text) {
  const button = make("button", { type: "button", textContent: "Copy" });
  button.dataset.copy = text;
  return button;
}

/** Copy what such a button is for, here or in a block of code. */
export async function copyFrom(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function* sentences({ state, finish, report }) {
  if (report?.degraded) {
    const why = String(report.degraded).endsWith("_refused") && report.why ? ` (${report.why})` : "";
    yield (DEGRADED[report.degraded] ?? String(report.degraded)) + why;
  }
  if (finish === "length") yield "Cut at the limit of tokens.";
  if (state === "stopped") yield "Stopped.";
  if (state === "cut") yield "Cut: the page was left while this was written.";
}

/** Whose documents decided how much of an answer, as a bar whose parts add to 100. */
function sharesBar(lanes) {
  const counts = [["cloud", "c"], ["device", "d"], ["neither", NONE]].map(([side, lane]) => [side, lanes.split(lane).length - 1]);
  const shares = counts.map(([side, count]) => [side, Math.floor((100 * count) / lanes.length)]);
  const most = counts.reduce((best, [, count], index) => (count > counts[best][1] ? index : best), 0);
  shares[most][1] += 100 - shares.reduce((sum, [, share]) => sum + share, 0);
  const told = shares.map(([side, share]) => `${side} ${share} %`).join(" · ");
  const parts = shares.map(([side, share]) => {
    const part = make("span", { className: side });
    part.style.flexGrow = share;
    return part;
  });
  return make("span", { className: "shares" }, make("span", { className: "bar", ariaHidden: "true" }, ...parts), told);
}

function summary({ report, usage }) {
  const parts = [];
  if (report?.strategy) parts.push(report.strategy);
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  return parts.join(" · ");
}
