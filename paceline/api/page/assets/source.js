// A cited passage in its document, rendered, with the words marked that the answer has from it.

import { request } from "./api.js";
import { safeAddress } from "./inline.js";
import { renderDocument } from "./markdown.js";
import { make } from "./elements.js";
import { t } from "./text.js";

const FEWEST = 8; // characters of a run of words that is marked
const MOST_WORDS = 4000; // of a passage times those of an answer: in thousands

/** Show a passage as /v1/passages gives it. answer: the text in which it is cited. */
export function showPassage(container, passage, answer = "") {
  const part = (text, className) => {
    const node = make("div", { className: `passage words ${className}` });
    renderDocument(node, passage.document, text);
    return node;
  };
  const cited = part(passage.text, "cited");
  container.replaceChildren(...(passage.before ?? []).map((text) => part(text, "around")), cited, ...(passage.after ?? []).map((text) => part(text, "around")));
  markSpan(cited, answer);
  return cited;
}

/** Mark the longest run of words that an element shares with a text. Ranges, so that no node is changed. */
function markSpan(element, text) {
  CSS.highlights?.delete("cited");
  const span = text && sharedSpan(element.textContent, text);
  if (!span || !CSS.highlights) return;
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let at = 0, node = walker.nextNode(); node; at += node.length, node = walker.nextNode()) {
    if (at <= span[0] && span[0] < at + node.length) range.setStart(node, span[0] - at);
    if (at < span[1] && span[1] <= at + node.length) range.setEnd(node, span[1] - at);
  }
  CSS.highlights.set("cited", new Highlight(range));
}

/** [start, end] in `passage` of the longest run of words that `text` has too, with no end of a line between them that the
 * passage has not; null for none worth marking. */
export function sharedSpan(passage, text) {
  const words = (of) => {
    let before = 0;
    return [...of.matchAll(/[\p{L}\p{N}]+/gu)].map(({ 0: word, index }) => {
      const ended = of.slice(before, index).includes("\n");
      before = index + word.length;
      return [word.toLowerCase(), index, before, ended];
    });
  };
  const [here, there] = [words(passage), words(text)];
  if (here.length * there.length > MOST_WORDS * 1000) return null;
  let best = [0, 0];
  let before = new Uint16Array(there.length + 1);
  for (let row = 0; row < here.length; row += 1) {
    const now = new Uint16Array(there.length + 1);
    for (let column = 0; column < there.length; column += 1) {
      if (here[row][0] !== there[column][0]) continue;
      now[column + 1] = (there[column][3] && !here[row][3] ? 0 : before[column]) + 1;
      if (now[column + 1] > best[0]) best = [now[column + 1], row];
    }
    before = now;
  }
  const [count, last] = best;
  if (!count) return null;
  const span = [here[last - count + 1][1], here[last][2]];
  return span[1] - span[0] < FEWEST && count < 2 ? null : span;
}

/** Open the dialog of a citation. side: this one, whose passages can be read around. */
export async function openSource(dialog, { document: name, side, passage, score, place, url }, answer, own) {
  const part = (id) => dialog.querySelector(`#source-${id}`);
  part("title").textContent = name;
  const where = place ? `, ${place}` : "";
  const known = Number.isFinite(score) ? ` ${t("similarity", { score: score.toFixed(2) })}` : "";
  part("told").textContent = (side === "web" ? t("sourceWeb", { place: where }) : t("sourceOf", { side: t(side === "device" ? "device" : "cloud"), place: where })) + known;
  const chunk = side === own ? /\/passage\?id=(\d+)$/.exec(url ?? "")?.[1] : undefined;
  // The other side's page of a passage would lead to the other side's chat.
  const opens = safeAddress(url ?? "") && (chunk !== undefined || !/\/passage\?/.test(url));
  part("link").hidden = !opens;
  if (opens) part("link").href = url;
  const shown = { document: passage ? name : "", text: passage || t("keepsText") };
  showPassage(part("text"), shown, passage ? answer.text : "");
  dialog.showModal();
  if (chunk === undefined) return;
  const whole = await request(`v1/passages/${chunk}`).catch(() => null); // removed meanwhile: what was read is shown
  if (!whole || !dialog.open || part("title").textContent !== name) return;
  showPassage(part("text"), whole, answer.text).scrollIntoView({ block: "center" });
}
