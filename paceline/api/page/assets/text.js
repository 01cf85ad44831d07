// The words of the page in the reader's language. A further language is one more file like en.js, named in LANGUAGES.

import { WORDS as EN } from "./en.js";

export const LANGUAGES = { en: "English", de: "Deutsch" };
let words = EN;

/** A sentence by its key, with values for its {names}. What a language lacks is said in English. */
export function t(key, values = {}) {
  return (words[key] ?? EN[key] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

/** Speak this language, or the browser's where it is not known, also in what the HTML holds; English while its file does not
 * come. */
export async function speak(wanted) {
  const preferred = navigator.languages.map((each) => each.slice(0, 2)).find((each) => each in LANGUAGES);
  const code = wanted in LANGUAGES ? wanted : (preferred ?? "en");
  const found = code === "en" ? null : await import(`./${code}.js`).catch(() => null);
  words = found?.WORDS ?? EN;
  document.documentElement.lang = found ? code : "en";
  for (const each of document.querySelectorAll("[data-t]")) each.textContent = t(each.dataset.t);
  for (const each of document.querySelectorAll("[data-hint]")) each.placeholder = t(each.dataset.hint);
  for (const each of document.querySelectorAll("[data-label]")) {
    each.ariaLabel = t(each.dataset.label);
    if (each.matches("button, label, select")) each.title = t(each.dataset.label);
  }
}
