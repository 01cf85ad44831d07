// The form of settings, the two choices beside the question, and the options of one conversation.

import { make } from "./elements.js";
import { LANGUAGES, t } from "./text.js";

const PRIVACY = { open: "privacyOpen", "": "privacyDefault", "answer-private": "privacyAnswer", "local-only": "privacyLocal" };
const SWITCHES = new Set(["plain", "local-only", "fast", "advanced", "research", "long"]);

const field = (name) => document.querySelector(`[data-setting="${name}"]`);

/** Put the settings into their fields, and the look on the page. changed: is called after each change. */
export function showSettings(settings, changed) {
  offer("language", [["", t("asBrowser")], ...Object.entries(LANGUAGES)], settings.language);
  for (const [name, value] of Object.entries(settings)) {
    const each = field(name);
    if (typeof value === "boolean") each.checked = value;
    else each.value = value;
    each.onchange = () => {
      settings[name] = typeof value === "boolean" ? each.checked : each.value;
      applyLook(settings);
      changed(name);
    };
  }
  applyLook(settings);
}

function applyLook(settings) {
  const { dataset } = document.documentElement;
  dataset.theme = settings.theme;
  dataset.lanes = settings.lanes ? "on" : "off";
  dataset.still = String(settings.still);
}

/** Offer what the models have. A choice that the server does not know falls back to its default. */
export function fillSettings(settings, models) {
  const names = models.map(({ id }) => id); // with a workflow behind some: `demo:advanced`
  if (!names.includes(settings.model)) settings.model = names[0] ?? "";
  const model = models.find(({ id }) => settings.model === id || settings.model.startsWith(`${id}:`));
  const strategies = model?.paceline?.strategies ?? [];
  if (!strategies.includes(settings.strategy)) settings.strategy = "";
  const atDevice = model?.paceline?.side === "device";
  const privacy = Object.entries(PRIVACY).filter(([value]) => atDevice || value !== "answer-private");
  if (!privacy.some(([value]) => value === settings.privacy)) settings.privacy = "";
  offer("model", names.map((name) => [name, name.split("/").at(-1), told(name)]), settings.model);
  offer("strategy", [["", t("serverChooses")], ...strategies.filter((name) => name !== "auto").map((name) => [name, name])], settings.strategy);
  offer("privacy", privacy.map(([value, key]) => [value, t(key), t(`${key}More`)]), settings.privacy);
}

function told(name) {
  const does = name.split(":").at(-1);
  return name.includes(":") && SWITCHES.has(does) ? `${name}: ${t(`does${does[0].toUpperCase()}${does.slice(1)}`)}` : name;
}

/** choices: [value, text, what it means] */
function offer(name, choices, chosen) {
  field(name).replaceChildren(...choices.map(([value, text, more]) => make("option", { value, textContent: text, title: more ?? "" })));
  field(name).value = chosen;
}

// ---- one conversation -----------------------------------------------------------------------------------------------
const NUMBERS = ["temperature", "top_p", "max_tokens"];

/** Open the dialog of a conversation's title, system prompt and sampling; `changed` is called with what was changed there. */
export function openOptions(dialog, conversation, changed) {
  const form = dialog.querySelector("form");
  const { title, system, ...numbers } = form.elements;
  title.value = conversation.title;
  system.value = conversation.system ?? "";
  for (const name of NUMBERS) numbers[name].value = conversation[name] ?? "";
  const values = () => {
    const numeric = NUMBERS.map((name) => [name, numbers[name].value !== "" && numbers[name].validity.valid ? Number(numbers[name].value) : null]);
    return Object.entries({ title: title.value.trim(), system: system.value.trim() && system.value, ...Object.fromEntries(numeric) });
  };
  const before = Object.fromEntries(values());
  dialog.onclose = () => {
    const found = values().filter(([name, value]) => value !== before[name] && (value || name !== "title"));
    if (found.length) changed(Object.fromEntries(found));
  };
  dialog.showModal();
}
