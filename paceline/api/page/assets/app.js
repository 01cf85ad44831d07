// The page: wires conversations, settings, documents and the key to the elements of index.html.

import { ApiError, request } from "./api.js";
import { Archive } from "./archive.js";
import { AnswerView, copyFrom, make, questionNode } from "./answer.js";
import { newAnswer, newConversation, requestBody, titleOf, writeAnswer } from "./conversation.js";
import { Documents } from "./documents.js";
import { KeyDialog } from "./key.js";
import { renderDocument } from "./markdown.js";
import { refreshStatus } from "./server_state.js";
import { fillSettings, readSettings, showSettings } from "./settings.js";
import { loadSettings, saveSettings, saveUnfinished } from "./storage.js";

const SAVE_MS = 1000; // between two savings of an answer that is being written
const DRAW_MS = 100; // between two drawings of it
const NEAR_END = 80; // px: whoever reads further up is left there

const $ = (id) => document.getElementById(id);
const settings = loadSettings();
const documents = new Documents($("uploads"), say);
const archive = new Archive(() => say("This browser keeps no conversations: its storage is full or forbidden."));
const keyDialog = new KeyDialog($("key"), connect);
let current = newConversation();
const writing = new Map(); // by conversation, the {abort, answer, view} that is being written in it
let asking = false; // a question waits for what other tabs have kept
let models = [];

// ---- small things ---------------------------------------------------------------------------------------------------
function say(sentence) {
  $("said").textContent = sentence;
}

function atEnd() {
  const { scrollHeight, scrollTop, clientHeight } = $("messages");
  return scrollHeight - scrollTop - clientHeight < NEAR_END;
}

function toEnd() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

// ---- conversations --------------------------------------------------------------------------------------------------
function showList() {
  const items = archive.conversations.map((conversation) => {
    const open = make("button", { type: "button", className: "open", textContent: conversation.title, title: conversation.title });
    open.onclick = () => select(conversation);
    if (conversation.id === current.id) open.setAttribute("aria-current", "true");
    const remove = make("button", { type: "button", className: "remove", textContent: "✕", ariaLabel: `Delete ${conversation.title}` });
    remove.onclick = () => removeConversation(conversation);
    return make("li", {}, open, remove);
  });
  $("conversations").replaceChildren(...items);
}

function select(conversation) {
  current = conversation;
  history.replaceState(null, "", conversation.messages.length ? `#c=${conversation.id}` : location.pathname + location.search);
  closeSide();
  showConversation();
  $("question").focus();
}

function showConversation() {
  $("title").textContent = current.title || "New conversation";
  document.title = current.title ? `${current.title} – Paceline` : "Paceline";
  const nodes = current.messages.map((message) => {
    if (message.role === "user") return questionNode(message.text);
    // An answer that is still being written keeps the view that its events go to.
    const written = writing.get(current);
    if (message === written?.answer) return written.view.node;
    return new AnswerView(message, actions).node;
  });
  $("messages").replaceChildren(...(nodes.length ? nodes : [welcome()]));
  showList();
  showBusy();
  toEnd();
}

function welcome() {
  const lead = make("strong", { textContent: "Ask a question" });
  return make("div", { className: "welcome" }, lead, "A device and a cloud write the answer together. Colours show whose documents decided each word.");
}

function removeConversation(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  writing.get(conversation)?.abort.abort();
  archive.remove(conversation);
  if (current === conversation) select(newConversation());
  else showList();
}

/** Show what other tabs have kept since. */
async function catchUp() {
  await archive.catchUp(writing);
  const newer = archive.find(current.id) ?? current;
  if (newer === current) return showList();
  current = newer;
  showConversation();
}

// ---- answers --------------------------------------------------------------------------------------------------------
const actions = { retry, openSource };

async function ask(text) {
  if (writing.has(current) || asking || !text.trim()) return;
  asking = true;
  showBusy();
  $("question").value = "";
  await catchUp();
  asking = false;
  const conversation = current;
  conversation.title ||= titleOf(text);
  conversation.messages.push({ role: "user", text: text.trim() });
  answerNow(conversation);
}

/** Drop this answer and all that follows it, and have it written anew. */
function retry(answer) {
  if (writing.has(current)) return;
  const at = current.messages.indexOf(answer);
  if (at === -1) return;
  current.messages.length = at;
  answerNow(current);
}

async function answerNow(conversation) {
  const body = requestBody(conversation.messages, settings, documents.readable);
  const answer = newAnswer();
  conversation.messages.push(answer);
  const view = new AnswerView(answer, actions);
  const abort = new AbortController();
  writing.set(conversation, { abort, answer, view });
  archive.remember(conversation);
  select(conversation);
  say("The answer is being written.");
  let timer = 0;
  let last = 0;
  let saved = Date.now();
  await writeAnswer(answer, body, abort.signal, () => {
    timer ||= setTimeout(draw, Math.max(0, last + DRAW_MS - performance.now()));
    // A conversation that was deleted meanwhile stays so.
    if (Date.now() - saved > SAVE_MS && archive.has(conversation)) {
      saved = Date.now();
      archive.remember(conversation);
    }
  });
  function draw() {
    clearTimeout(timer);
    timer = 0;
    const follow = atEnd();
    view.update();
    if (follow && current === conversation) toEnd();
    last = performance.now();
  }
  writing.delete(conversation);
  if (archive.has(conversation)) archive.remember(conversation);
  draw();
  showBusy();
  say({ done: "The answer is complete.", stopped: "Stopped.", failed: "The answer failed." }[answer.state]);
  if (answer.status === 401) keyDialog.open(answer.error, () => current === conversation && retry(answer));
  refreshStatus();
}

function showBusy() {
  const busy = asking || writing.has(current);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function openSource({ document: name, side, passage, score, place, url }) {
  $("source-title").textContent = name;
  const known = Number.isFinite(score) ? ` Similarity to the question: ${score.toFixed(2)}.` : "";
  const where = place ? `, ${place}` : "";
  $("source-told").textContent = `A document of the ${side}${where}.${known}`;
  // The other side's page of a passage would lead to the other side's chat.
  const elsewhere = /\/passage\?/.test(url ?? "") && side !== $("status").dataset.side;
  const opens = /^https?:/.test(url ?? "") && !elsewhere;
  $("source-link").hidden = !opens;
  if (opens) $("source-link").href = url;
  const shown = make("div", { className: "words" });
  renderDocument(shown, passage ? name : "", passage || "The other side keeps the text of its documents to itself.");
  $("source-text").replaceChildren(shown);
  $("source").showModal();
}

// ---- server, key, settings ------------------------------------------------------------------------------------------
/** Load what needs a key; asks for one where the server wants it. */
async function connect() {
  try {
    models = (await request("v1/models")).data.filter((model) => model.paceline?.kind !== "embedding");
  } catch (error) {
    if (error.status === 401) keyDialog.open();
    else showFailure(error);
    return;
  }
  fillSettings(settings, models);
  saveSettings(settings);
  await documents.load().catch(() => {}); // a key need not allow documents
}

function showFailure(error) {
  const sentence = error instanceof ApiError ? error.message : String(error);
  $("messages").prepend(make("p", { className: "error", role: "alert", textContent: sentence }));
}

$("settings").querySelector("form").oninput = () => {
  readSettings(settings);
  saveSettings(settings);
  fillSettings(settings, models);
};
$("settings").querySelector("form").onsubmit = (event) => event.preventDefault();
$("open-settings").onclick = () => $("settings").showModal();
$("change-key").onclick = () => {
  $("settings").close();
  keyDialog.open();
};
$("delete-all").onclick = () => {
  if (!confirm("Delete all conversations in this browser?")) return;
  for (const { abort } of writing.values()) abort.abort();
  archive.removeAll();
  $("settings").close();
  select(newConversation());
};

// ---- documents ------------------------------------------------------------------------------------------------------
$("open-documents").onclick = async () => {
  $("documents-error").textContent = "";
  $("documents").showModal();
  try {
    await documents.load();
  } catch (error) {
    $("documents-error").textContent = error.message;
  }
};
$("files").onchange = () => {
  const files = [...$("files").files];
  $("files").value = "";
  documents.add(files);
};
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // the browser would leave the page to show the file
    $("drop").classList.toggle("over", kind === "dragenter" || kind === "dragover");
    if (kind !== "drop") return;
    if (!document.querySelector("dialog[open]")) $("documents").showModal();
    documents.add([...event.dataTransfer.files]);
  });
}

// ---- the composer and the keyboard ----------------------------------------------------------------------------------
$("composer").onsubmit = (event) => {
  event.preventDefault();
  ask($("question").value);
};
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask($("question").value);
};
$("stop").onclick = () => writing.get(current)?.abort.abort();
$("new").onclick = () => select(newConversation());

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if ($("side").classList.contains("open")) closeSide();
    else writing.get(current)?.abort.abort();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    select(newConversation());
  } else if (event.key === "/" && !typing && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    $("question").focus();
  }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.close !== undefined) button.closest("dialog").close();
  if (button?.dataset.copy !== undefined) await copyFrom(button);
});

$("open-side").onclick = () => {
  $("side").classList.add("open");
  $("open-side").setAttribute("aria-expanded", "true");
  $("new").focus();
};
$("close-side").onclick = closeSide;
function closeSide() {
  $("side").classList.remove("open");
  $("open-side").setAttribute("aria-expanded", "false");
}

// ---- begin ----------------------------------------------------------------------------------------------------------
async function begin() {
  showSettings(settings);
  try {
    await archive.load();
  } catch {
    say("This browser keeps no conversations: its storage is forbidden.");
  }
  const wanted = new URLSearchParams(location.hash.slice(1)).get("c");
  current = archive.find(wanted) ?? current;
  showConversation();
  await Promise.all([refreshStatus(), connect()]);
}

window.addEventListener("focus", () => {
  refreshStatus();
  catchUp();
});
window.addEventListener("pagehide", () => writing.size && saveUnfinished([...writing.keys()]));
begin();
