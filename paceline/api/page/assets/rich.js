// Colours of code, formulas and the page's buttons, as nodes. The libraries in vendor/ are loaded when something first needs them; until
// then, and where one fails, the text stands as it was written.

import { icon, iconButton, make } from "./elements.js";
import { appendRun } from "./run.js";
import { t } from "./text.js";

// Its expressions take time in the square of what repeats, so that only what people write as code is coloured.
const MAX_CODE = 8000; // characters
const MAX_LINE = 200; // likewise
const MAX_FORMULA = 2000; // likewise
// A macro whose argument stands in it many times makes millions of nodes of a short formula.
const DEFINES = /\\(?:[gex]?def|(?:future)?let|(?:new|renew|provide)command)(?![a-zA-Z])/;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#x27": "'" };
const PIECE = /<span class="([\w\- ]+)">|<\/span>|&(#?\w+);|[^<&]+/g; // all that highlight.js writes

export function copyButton(text) {
  const button = iconButton("copy", t("copy"), null);
  button.dataset.copy = text;
  return button;
}

/** Copy what such a button is for. */
export async function copyFrom(button) {
  let done = "copied";
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
  } catch {
    done = "notAllowed";
  }
  button.replaceChildren(icon(done === "copied" ? "check" : "close"));
  button.title = t(done);
  setTimeout(() => {
    button.replaceChildren(icon("copy"));
    button.title = t("copy");
  }, 1500);
  return t(done);
}

window.speechSynthesis?.getVoices(); // browsers look for them when first asked

/** A button by which the browser reads a text aloud, or falls silent; none without a voice of this machine, since others
 * would have the text sent away. text: is called for it. */
export function voiceButton(text) {
  const voices = window.speechSynthesis?.getVoices().filter((each) => each.localService) ?? [];
  const voice = voices.find(({ lang }) => lang.startsWith(document.documentElement.lang)) ?? voices[0];
  if (!voice) return [];
  return [iconButton("voice", t("readAloud"), () => {
    const silent = !speechSynthesis.speaking;
    speechSynthesis.cancel();
    if (silent) speechSynthesis.speak(Object.assign(new SpeechSynthesisUtterance(text()), { voice, lang: voice.lang }));
  })];
}

// ---- code -----------------------------------------------------------------------------------------------------------
/** Colour a block of code whose end has come, once the browser has time. The words' lanes stay. */
export function colourCode(code, run, language) {
  if (run.length > MAX_CODE || run.text.split("\n").some((line) => line.length > MAX_LINE)) return;
  const later = window.requestIdleCallback ?? setTimeout;
  later(async () => {
    const hljs = (await import("./vendor/highlight.js").catch(() => ({}))).default;
    await new Promise((resolve) => setTimeout(resolve)); // a task of its own, after that of the library
    if (!hljs?.getLanguage(language) || !code.isConnected) return;
    const { value } = hljs.highlight(run.text, { language, ignoreIllegals: true });
    const made = document.createDocumentFragment();
    let at = made;
    let start = 0;
    for (const [whole, name, entity] of value.matchAll(PIECE)) {
      if (name) at = at.appendChild(make("span", { className: name }));
      else if (whole === "</span>") at = at.parentNode ?? made;
      else {
        const size = (entity ? (ENTITIES[entity] ?? whole) : whole).length;
        appendRun(at, run.slice(start, start + size));
        start += size;
      }
    }
    if (start === run.length) code.replaceChildren(made); // else it wrote something that is not known here
  });
}

// ---- formulas -------------------------------------------------------------------------------------------------------
/** Show a formula in an element: TeX at first, then as MathML, which browsers draw and read aloud. One that is long or
 * defines something stays TeX. */
export function showFormula(element, source, display) {
  element.className = display ? "formula display" : "formula";
  if (display) element.tabIndex = 0; // scrolled with the keyboard
  element.textContent = source;
  if (source.length > MAX_FORMULA || DEFINES.test(source)) return element;
  if (formulas.push({ element, source, displayMode: display }) === 1) import("./vendor/temml.js").then(({ default: temml }) => drawFormulas(temml), () => (formulas.length = 0));
  return element;
}

const formulas = []; // that are to be drawn
const FORMULAS_MS = 15; // of a frame

/** As many as a frame has time for. Those of words that were written anew meanwhile are left out. */
function drawFormulas(temml) {
  const end = performance.now() + FORMULAS_MS;
  while (formulas.length && performance.now() < end) {
    const { element, source, displayMode } = formulas.shift();
    if (!element.isConnected) continue;
    try {
      temml.render(source, element, { displayMode, throwOnError: false, maxExpand: 200, trust: false });
    } catch {
      element.textContent = source;
    }
  }
  if (formulas.length) setTimeout(drawFormulas, 0, temml);
}
