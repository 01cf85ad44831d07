// What the browser keeps: conversations in IndexedDB, settings in localStorage.

import { merge } from "./conversation.js";

const DATABASE = "paceline";
const STORE = "conversations";
const SETTINGS = "paceline.settings";
const UNFINISHED = "paceline.unfinished";

export const DEFAULTS = {
  model: "",
  strategy: "",
  privacy: "",
  documents: true,
  lanes: true,
  still: false,
  theme: "auto",
  language: "",
  keep: "server",
};

// ---- texts by name --------------------------------------------------------------------------------------------------
const here = new Map(); // what the browser does not keep, for as long as this page is open

/** area: localStorage, or sessionStorage for this tab alone. */
export function recall(name, area = "localStorage") {
  try {
    return window[area].getItem(name) ?? here.get(area + name) ?? null;
  } catch {
    return here.get(area + name) ?? null; // storage is forbidden
  }
}

/** Keep a text; null: forget it. False: in this page alone, since storage is full or forbidden. */
export function keep(name, text, area = "localStorage") {
  here.delete(area + name);
  try {
    window[area].removeItem(name); // an older text must not outlive one that does not fit
    if (text !== null) window[area].setItem(name, text);
    return true;
  } catch {
    if (text !== null) here.set(area + name, text);
    return false;
  }
}

function recalledObject(name) {
  try {
    return Object(JSON.parse(recall(name)));
  } catch {
    return {}; // written by nobody we know
  }
}

// ---- settings -------------------------------------------------------------------------------------------------------
export function loadSettings() {
  const saved = recalledObject(SETTINGS);
  const known = Object.entries(DEFAULTS).map(([name, value]) => [name, typeof saved[name] === typeof value ? saved[name] : value]);
  return Object.fromEntries(known);
}

/** Keep one choice, beside those that other tabs have kept. */
export function saveSetting(name, value) {
  keep(SETTINGS, JSON.stringify({ ...recalledObject(SETTINGS), [name]: value }));
}

// ---- conversations --------------------------------------------------------------------------------------------------
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function run(mode, work) {
  const transaction = (await database()).transaction(STORE, mode);
  const asked = work(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** Keep conversations while their page is being left: only localStorage writes before the page is gone. */
export function saveUnfinished(conversations) {
  const left = new Map([...unfinished(), ...conversations].map((each) => [each.id, each])); // other tabs' too
  keep(UNFINISHED, JSON.stringify([...left.values()]));
}

function unfinished() {
  const found = recalledObject(UNFINISHED);
  return Array.isArray(found) ? found.filter((each) => each?.id) : [];
}

/** All conversations of this owner, the latest first. */
export async function loadConversations(owner) {
  const left = unfinished();
  keep(UNFINISHED, null);
  for (const each of left) await saveConversation(each);
  const found = await run("readonly", (store) => store.getAll());
  return found.filter((each) => each.owner === owner).sort((one, other) => other.updated - one.updated);
}

/** Give this owner the conversations that have none. */
export function ownConversations(owner) {
  return run("readwrite", (store) => {
    const asked = store.getAll();
    asked.onsuccess = () => {
      for (const each of asked.result) if (each.owner === undefined) store.put({ ...each, owner });
    };
    return asked;
  });
}

/** Keep a conversation with what other tabs have kept of it; one that they have deleted stays so. False: that is the case. */
export async function saveConversation(conversation) {
  let there = true;
  await run("readwrite", (store) => {
    const asked = store.get(conversation.id);
    asked.onsuccess = () => {
      const held = asked.result;
      there = conversation.deleted || (held ? !held.deleted : !conversation.stored);
      if (!there) return;
      if (held && !conversation.deleted) merge(held, conversation);
      store.put({ ...(held && !conversation.deleted ? held : conversation), stored: true });
    };
    return asked;
  });
  conversation.stored ||= there;
  return there;
}

export function deleteConversation(id) {
  return run("readwrite", (store) => store.delete(id));
}
