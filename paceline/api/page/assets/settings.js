// The form of settings: what the server offers, and what was chosen.

import { make } from "./answer.js";

const PRIVACY = [
  ["", "the server's default: document-private"],
  ["open", "open: also what is predicted from documents"],
  ["document-private", "document-private: nothing of its documents"],
  ["answer-private", "answer-private: only the search query"],
  ["local-only", "local-only: nothing"],
];

const SWITCHES = {
  plain: "reads no documents",
  "local-only": "sends nothing to the other side",
  fast: "searches, and reranks what it finds",
  advanced: "divides the question and searches for each part",
  research: "searches the web besides",
};

const field = (name) => document.querySelector(`#settings [name="${name}"]`);

/** Put the settings into the form, and the theme on the page. */
export function showSettings(settings) {
  for (const [name, value] of Object.entries(settings)) {
    if (typeof value === "boolean") field(name).checked = value;
    else field(name).value = value;
  }
  applyLook(settings);
}

/** Read the form into the settings. A temperature that is no number from 0 to 2 is left out. */
export function readSettings(settings) {
  for (const [name, value] of Object.entries(settings)) {
    settings[name] = typeof value === "boolean" ? field(name).checked : field(name).value;
  }
  if (!field("temperature").validity.valid) settings.temperature = "";
  applyLook(settings);
}

function applyLook(settings) {
  document.documentElement.dataset.theme = settings.theme;
  document.documentElement.dataset.lanes = settings.lanes ? "on" : "off";
}

/** Offer what the models have. A choice that the server does not know falls back to its default. */
export function fillSettings(settings, models) {
  const names = models.map(({ id }) => id); // with a workflow behind some: `demo:advanced`
  if (!names.includes(settings.model)) settings.model = names[0] ?? "";
  const model = models.find(({ id }) => settings.model === id || settings.model.startsWith(`${id}:`));
  const strategies = model?.paceline?.strategies ?? [];
  if (!strategies.includes(settings.strategy)) settings.strategy = "";
  const atDevice = model?.paceline?.side === "device";
  const privacy = PRIVACY.filter(([value]) => atDevice || value !== "answer-private");
  if (!privacy.some(([value]) => value === settings.privacy)) settings.privacy = "";
  offer("model", names.map((name) => [name, told(name)]), settings.model);
  offer("strategy", [["", "the server chooses"], ...strategies.filter((name) => name !== "auto").map((name) => [name, name])], settings.strategy);
  offer("privacy", privacy, settings.privacy);
}

function told(name) {
  const does = SWITCHES[name.split(":").at(-1)];
  return name.includes(":") && does ? `${name} – ${does}` : name;
}

function offer(name, choices, chosen) {
  field(name).replaceChildren(...choices.map(([value, text]) => make("option", { value, textContent: text })));
  field(name).value = chosen;
}
