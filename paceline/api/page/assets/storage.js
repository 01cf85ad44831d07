// What the browser keeps: conversations in IndexedDB, settings in localStorage. Nothing of it is sent anywhere.

const DATABASE = "paceline";
const STORE = "conversations";
const SETTINGS = "paceline.settings";
const UNFINISHED = "paceline.unfinished";

export const DEFAULTS = {
  model: "",
  strategy: "",
  privacy: "",
  temperature: "",
  documents: true,
  lanes: true,
  theme: "auto",
};

export function loadSettings() {
  let saved = {};
  try {
    saved = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") ?? {};
  } catch {
    // written by nobody we know: the defaults hold
  }
  const known = Object.entries(DEFAULTS).map(([name, value]) => [name, typeof saved[name] === typeof value ? saved[name] : value]);
  return Object.fromEntries(known);
}

export function saveSettings(settings) {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
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

/** Keep a conversation while its page is being left: only localStorage writes before the page is gone. */
export function saveUnfinished(conversation) {
  localStorage.setItem(UNFINISHED, JSON.stringify(conversation));
}

/** All conversations, the latest first. */
export async function loadConversations() {
  const unfinished = JSON.parse(localStorage.getItem(UNFINISHED) ?? "null");
  localStorage.removeItem(UNFINISHED);
  if (unfinished) await saveConversation(unfinished);
  const found = await run("readonly", (store) => store.getAll());
  return found.sort((one, other) => other.updated - one.updated);
}

export function saveConversation(conversation) {
  return run("readwrite", (store) => store.put(conversation));
}

export function deleteConversation(id) {
  return run("readwrite", (store) => store.delete(id));
}

export function deleteAllConversations() {
  return run("readwrite", (store) => store.clear());
}
