// The page: wires conversations, settings, documents and the key to the elements of index.html.

import { AnswerView, questionNode, versionsBar } from "./answer.js";
import { ApiError, keyName, request } from "./api.js";
import { Archive } from "./archive.js";
import { add, asJson, change, DONE, fromJson, newAnswer, newConversation, pathOf, requestBody, titleOf, turnTo, versionsOf } from "./conversation.js";
import { readable, Uploads } from "./documents.js";
import { make } from "./elements.js";
import { KeyDialog } from "./key.js";
import { ConversationList, save, titled } from "./list.js";
import { copyFrom } from "./rich.js";
import { fillSettings, openOptions, showSettings } from "./settings.js";
import { openSource } from "./source.js";
import { loadSettings, saveSetting, saveUnfinished } from "./storage.js";
import { speak, t } from "./text.js";
import { welcome } from "./welcome.js";
import { cancelAnswer, readRest, writeAnswer } from "./writer.js";

const SAVE_MS = 1000; // between two savings of an answer that is being written
const DRAW_MS = 50; // between two drawings of it, or so long that they take a quarter of the time; each in a frame
const SHOW_MS = 30; // for the answers of a conversation that is opened
const NEAR_END = 80; // px: whoever reads further up is left there

const $ = (id) => document.getElementById(id);
const settings = loadSettings();
const uploads = new Uploads(say);
const attached = new WeakMap(); // by conversation, its uploads
const writing = new Map(); // by conversation, the {abort, answer, view, end} that is being written in it
const archive = new Archive(writing, (key, reason) => ($("unkept").textContent = key && t(key, { reason })));
const keyDialog = new KeyDialog($("key"), () => load().then(connect));
const list = new ConversationList({ list: $("conversations"), search: $("search"), menu: $("menu") }, archive, { select, changed, remove, failed: showFailure });
let current = newConversation();
let drawn = null; // the conversation that is shown, where its reader is to be left
let shown = new Map(); // by message, their views
const asking = new Set(); // {conversation, text} of questions that wait for files, and for what other tabs have kept
let models = [];
let server = { side: "cloud", linked: false }; // what it says of itself without a key
let documents = null; // what this side reads, once it is known

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
/** Show another in place of the one that is not there any more, or not yet: what is asked in it is asked there. */
function replace(conversation) {
  const waiting = waitingIn(current);
  if (waiting) waiting.conversation = conversation;
  current = conversation;
}

async function select(conversation) {
  current = conversation;
  drawn = null;
  $("failure").replaceChildren();
  showAddress();
  closeSide();
  showConversation();
  $("question").focus();
  if (conversation.away) {
    const failure = await archive.fetch(conversation).then(() => null, (error) => error);
    if (current === conversation) showConversation();
    if (current === conversation && failure) showFailure(failure, () => select(conversation));
  }
  complete(conversation);
}

function showAddress() {
  history.replaceState(null, "", archive.has(current) ? `#c=${current.id}` : location.pathname + location.search);
}

function showTitle() {
  $("title").textContent = titled(current);
  document.title = current.title ? `${current.title} – Paceline` : "Paceline";
}

function showConversation() {
  const follow = drawn !== current || atEnd();
  drawn = current;
  const { activeElement } = document;
  showTitle();
  const until = performance.now() + SHOW_MS;
  const views = new Map();
  const nodes = pathOf(current).reverse().map((message) => { // the last one is seen first
    const held = shown.get(message);
    const written = writing.get(current);
    let view;
    if (message.role !== "user") view = (message === written?.answer ? written.view : held) ?? new AnswerView(message, actions);
    else if (held?.node.querySelector(".editing")) view = held;
    else view = { node: questionNode(message, actions.versions(message), (text) => ask(text, message.parent)) };
    view.show?.(until);
    views.set(message, view);
    return view.node;
  }).reverse();
  shown = views;
  const empty = !nodes.length && !current.away;
  $("messages").replaceChildren(...(empty ? [welcome({ server, documents, ask })] : nodes));
  $("main").dataset.empty = String(empty);
  if (!attached.has(current)) attached.set(current, filesOf(current));
  $("attached").replaceChildren(attached.get(current).list);
  list.show(current, writing);
  showBusy();
  if (empty) $("messages").scrollTop = 0;
  else if (follow) toEnd();
  if (activeElement.isConnected) activeElement.focus({ preventScroll: true }); // what is edited was moved
}

/** Show which files there are now. */
function showFiles(conversation) {
  return Promise.all([uploads, attached.get(conversation)].map((each) => each?.load().catch(() => {}))); // a key need not allow documents
}

function filesOf(conversation) {
  const files = new Uploads(say, conversation, (store) => {
    if (isLost(conversation)) {
      archive.forget({ ...newConversation(), id: store, owner: conversation.owner, stores: [store] });
      throw new ApiError(t("removed", { name: titled(conversation) }));
    }
    conversation.stores.push(store);
    archive.remember(conversation); // though nothing is asked yet: it is found again, and deleted with its files
    if (conversation === current) showAddress();
    list.show(current, writing);
  });
  if (conversation.stores.length) files.load().catch(() => {});
  files.list.ariaLabel = t("attachedFiles");
  return files;
}

function changed(conversation, fields) {
  change(conversation, fields);
  if (archive.has(conversation)) archive.remember(conversation);
  showTitle();
  list.show(current, writing);
}

function remove(conversation) {
  if (!confirm(t("deleteThis", { title: titled(conversation) }))) return;
  removeAtOnce(conversation);
  if (current === conversation) select(newConversation());
  else list.show(current, writing);
}

function removeAtOnce(conversation) {
  archive.remove(conversation); // and its answer, which is read on here alone where the server has not yet said its id
  const { answer, abort } = writing.get(conversation) ?? {};
  if (answer?.response || !answer?.kept) abort?.abort();
}

/** It was kept, and is deleted, here or elsewhere. */
function isLost(conversation) {
  return !archive.has(conversation) && Boolean(conversation.messages.length || conversation.stores.length || conversation.server);
}

/** Show what other tabs and browsers have kept since. */
async function catchUp(remote = true) {
  const seen = () => JSON.stringify([current.messages.length, pathOf(current).map(({ id, state }) => [id, state])]);
  const before = seen();
  await archive.takeOver().catch(() => {}); // of this tab alone
  if (remote) archive.inTurn(() => archive.bury());
  if (remote && archive.kept) await archive.inTurn(() => archive.pull());
  if (isLost(current)) {
    replace(newConversation());
    showAddress();
  }
  const files = remote && showFiles(current);
  showTitle();
  if (before === seen()) list.show(current, writing);
  else showConversation();
  await complete(current);
  await files;
}

/** Read on where an answer is still being written at the server, and fetch what this browser lacks of others. */
async function complete(conversation) {
  const path = pathOf(conversation);
  const open = path.find(({ state, response }) => response && !DONE.has(state));
  if (open && !writing.has(conversation)) write(conversation, open, null);
  for (const answer of path.filter(({ bare, state }) => bare && DONE.has(state))) {
    if (!(await readRest(answer))) continue; // another time
    answer.context = contextOf(answer.model);
    archive.save(conversation);
    const follow = atEnd();
    shown.get(answer)?.show(performance.now() + SHOW_MS);
    if (follow && conversation === current) toEnd();
  }
}

function contextOf(model) {
  return models.find(({ id }) => id === model)?.max_model_len ?? 0;
}

// ---- answers --------------------------------------------------------------------------------------------------------
const actions = {
  retry(answer) {
    whenReady((conversation) => answerNow(conversation, answer.parent));
  },
  readOn: () => complete(current),
  goOn(answer) {
    whenReady((conversation) => answerNow(conversation, answer.parent, answer));
  },
  openSource: (citation, answer) => openSource($("source"), citation, answer, server.side),
  versions: (message) => versionsBar(versionsOf(current, message), message, (other) => {
    turnTo(current, other);
    changed(current, {});
    showConversation();
    complete(current);
  }),
};

/** parent: the message below which the question goes, where it is not the last one. */
function ask(text, parent) {
  if (!text.trim()) return;
  whenReady((conversation) => {
    if (!conversation.title) change(conversation, { title: titleOf(text) });
    const question = add(conversation, { role: "user", text: text.trim() }, parent);
    answerNow(conversation, question.id);
  }, parent === undefined ? text : "");
}

/** Call `work` with this conversation once an answer can read its files and continue what other tabs have kept; unless it is
 * stopped, which gives the text back. text: taken out of the field. */
async function whenReady(work, text = "") {
  if (openAnswer(current) || waitingIn(current)) return showFailure(new ApiError(t("writing")));
  const mine = { conversation: current, text };
  asking.add(mine);
  showBusy();
  if (text) $("question").value = "";
  fit();
  await started; // until then no model is known
  if (!models.length) await connect();
  if (!models.length) return void stop(mine.conversation);
  await attached.get(mine.conversation)?.settled();
  await catchUp(false);
  const kept = mine.conversation.server && (archive.kept || mine.conversation.away);
  const failure = kept ? await archive.fetch(mine.conversation).then(() => null, (error) => error) : null;
  await attached.get(mine.conversation)?.settled();
  if (!asking.has(mine)) return; // stopped
  const { conversation } = mine;
  if (conversation.away) {
    stop(conversation);
    showFailure(failure, () => select(conversation));
    return;
  }
  asking.delete(mine);
  if (isLost(conversation)) showBusy();
  else work(conversation);
}

/** Have an answer written below this question. from: one that was cut, with which it begins. */
function answerNow(conversation, question, from = null) {
  change(conversation, { leaf: question });
  const kept = archive.kept;
  const stores = [...uploads.readable, ...(attached.get(conversation)?.readable ?? [])];
  const body = requestBody(conversation, settings, stores, kept);
  const { model } = settings;
  const answer = { ...newAnswer(), kept, model, context: contextOf(model) };
  if (from) {
    Object.assign(answer, { text: from.text, lanes: from.lanes });
    body.input.push({ type: "message", role: "assistant", content: from.text });
    body.continue_final_message = true;
  }
  write(conversation, add(conversation, answer), body);
  if (conversation === current) return select(conversation);
  list.show(current, writing);
  return showBusy();
}

async function write(conversation, answer, body) {
  const view = new AnswerView(answer, actions);
  const abort = new AbortController();
  writing.set(conversation, { abort, answer, view, end });
  if (body) archive.remember(conversation);
  else if (conversation === current) showConversation();
  say(t("writing"));
  let timer = 0;
  let next = 0;
  let saved = Date.now();
  let known = answer.response;
  await writeAnswer(answer, body, {
    kept: answer.kept,
    signal: abort.signal,
    changed() {
      timer ||= setTimeout(requestAnimationFrame, next - performance.now(), draw);
      const began = known !== answer.response;
      if (!began && Date.now() - saved < SAVE_MS) return;
      saved = Date.now();
      known = answer.response;
      if (archive.has(conversation)) archive.remember(conversation, began);
      else if (answer.response && !abort.signal.aborted) { // it was deleted meanwhile
        archive.forget({ ...conversation, id: answer.id, server: "", stores: [], messages: [answer] });
        abort.abort();
      }
      if (writing.get(conversation)?.answer === answer || !answer.response || abort.signal.aborted) return;
      cancelAnswer(answer).catch(() => {}); // it was stopped before its id was known
      abort.abort();
    },
  });
  end();
  function draw() {
    clearTimeout(timer);
    const start = performance.now();
    const follow = atEnd();
    const whole = view.update();
    if (follow && current === conversation) toEnd();
    next = start + Math.max(DRAW_MS, 4 * (performance.now() - start));
    timer = whole ? 0 : setTimeout(requestAnimationFrame, next - performance.now(), draw);
  }
  function end() {
    if (writing.get(conversation)?.answer !== answer) return;
    writing.delete(conversation);
    if (archive.has(conversation)) archive.remember(conversation);
    draw();
    showBusy();
    list.show(current, writing);
    if (conversation === current) $("failure").replaceChildren();
    say({ done: t("done"), stopped: t("stopped"), failed: t("failed"), unread: t("failed") }[answer.state] ?? "");
    const again = answer.state === "unread" ? actions.readOn : actions.retry;
    if (answer.status === 401) keyDialog.open(answer.error, () => current === conversation && again(answer));
    if (answer.status === 404) showFiles(conversation); // one of their stores may be gone
    refreshStatus();
  }
}

/** The answer that is being written in a conversation, here or for now at the server alone. */
function openAnswer(conversation) {
  return writing.get(conversation)?.answer ?? pathOf(conversation).find(({ state }) => state === "writing");
}

/** End the answer of a conversation, at the server too. */
function stop(conversation) {
  const waiting = waitingIn(conversation);
  if (waiting) {
    asking.delete(waiting);
    $("question").value = [waiting.text, $("question").value].filter(Boolean).join("\n");
    fit();
    return showBusy();
  }
  const answer = openAnswer(conversation);
  const written = writing.get(conversation);
  if (answer?.kept && answer.response) {
    cancelAnswer(answer).catch((error) => openAnswer(conversation) === answer && showFailure(error, () => stop(conversation)));
  } else if (answer?.kept && written) { // cancelled once its id is known
    answer.state = "stopped";
    written.end();
  } else written?.abort.abort();
  return undefined;
}

function waitingIn(conversation) {
  return [...asking].find((each) => each.conversation === conversation);
}

function showBusy() {
  const busy = (waitingIn(current) ?? openAnswer(current)) !== undefined;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

// ---- server, key, settings ------------------------------------------------------------------------------------------
/** Show who is linked, as far as the server tells everybody. */
async function refreshStatus() {
  const badge = $("status");
  try {
    server = await request("readyz");
    const other = server.side === "cloud" ? "device" : "cloud";
    badge.textContent = t(server.linked ? "linked" : "alone", { side: t(server.side), other: t(other) });
    badge.title = t("serverHas", { model: server.model, count: server.documents });
    badge.dataset.linked = String(server.linked);
  } catch (error) {
    badge.textContent = t(error.status ? "notReady" : "noAnswer");
    badge.dataset.linked = "false";
  }
}

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
  $("failure").replaceChildren();
  archive.kept = settings.keep === "server";
  await archive.own();
  const [read] = await Promise.all([readable().catch(() => null), catchUp()]);
  documents = read;
  if (!current.messages.length && !current.away) showConversation();
}

/** again: is called where it is to be tried again. */
function showFailure(error, again = null) {
  const sentence = error instanceof ApiError ? error.message : String(error);
  const button = again ? [make("button", { type: "button", textContent: t("again"), onclick: again })] : [];
  $("failure").replaceChildren(make("p", { className: "error", role: "alert" }, sentence), ...button);
}

async function settingsChanged(name) {
  saveSetting(name, settings[name]);
  if (name === "keep") archive.kept = settings.keep === "server";
  if (name === "language") {
    await speak(settings.language);
    showSettings(settings, settingsChanged);
    shown.clear(); // they speak the one before
    showConversation();
    refreshStatus();
  }
  fillSettings(settings, models);
}

$("settings").querySelector("form").onsubmit = (event) => event.preventDefault();
$("open-settings").onclick = () => $("settings").showModal();
$("open-options").onclick = () => openOptions($("options"), current, changed.bind(null, current));
$("change-key").onclick = () => {
  $("settings").close();
  keyDialog.open();
};
$("delete-all").onclick = () => {
  if (!confirm(t("deleteAllSure"))) return;
  for (const each of archive.conversations) removeAtOnce(each);
  $("settings").close();
  select(newConversation());
};
$("export-all").onclick = async () => {
  let failure = null;
  for (const each of archive.conversations.filter(({ away }) => away)) await archive.fetch(each).catch((error) => (failure = error));
  if (failure) $("settings").close();
  if (failure) showFailure(failure);
  else save("paceline.json", asJson(archive.conversations), "application/json");
};
$("import").onclick = () => $("import-file").click();
$("import-file").onchange = async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  try {
    const found = fromJson(await file.text());
    for (const each of found) archive.remember(each, true, each.updated);
    say(t("imported", { count: found.length }));
    $("settings").close();
    if (found.length) select(found[0]);
  } catch {
    showFailure(new ApiError(t("notImported")));
    $("settings").close();
  }
};

// ---- documents ------------------------------------------------------------------------------------------------------
$("uploads").append(uploads.list);
$("open-documents").onclick = async () => {
  const side = { side: t(server.side) };
  $("read-for").textContent = t("readFor", side);
  $("uploaded-told").textContent = t("uploadedTold", side);
  $("documents-error").textContent = "";
  $("documents").showModal();
  try {
    const [read] = await Promise.all([readable().catch(() => ({ data: [], total: 0 })), uploads.load()]);
    const names = read.data.map(({ name, topic }) => make("li", { title: topic, textContent: name }));
    if (read.total > names.length) names.push(make("li", { textContent: t("andMore", { count: read.total - names.length }) }));
    $("readable").replaceChildren(...names);
  } catch (error) {
    $("documents-error").textContent = error.message;
  }
};
for (const [field, files] of [["files", () => uploads], ["attach-files", () => attached.get(current)]]) {
  $(field).onchange = () => {
    const chosen = [...$(field).files];
    $(field).value = "";
    files().add(chosen);
  };
}
$("attach").onclick = () => $("attach-files").click();
$("question").onpaste = (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || event.clipboardData.types.includes("text/plain")) return; // cells of a sheet are a picture as well
  event.preventDefault();
  attached.get(current).add(files);
};
for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // the browser would leave the page to show the file
    const over = kind === "dragenter" || kind === "dragover";
    const target = $("documents").open ? $("drop") : $("composer");
    target.classList.toggle("over", over);
    if (kind === "drop") ($("documents").open ? uploads : attached.get(current)).add([...event.dataTransfer.files]);
  });
}

// ---- the composer and the keyboard ----------------------------------------------------------------------------------
/** Make the field as high as its text. */
function fit() {
  if (!CSS.supports("field-sizing", "content")) {
    $("question").style.height = "auto";
    $("question").style.height = `${$("question").scrollHeight}px`;
  }
}
$("question").oninput = fit;
$("composer").onsubmit = (event) => {
  event.preventDefault();
  ask($("question").value);
};
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask($("question").value);
};
$("stop").onclick = () => stop(current);
$("new").onclick = () => select(newConversation());

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, textarea, select");
  const free = !document.querySelector("dialog[open], :popover-open");
  if (event.isComposing || (event.key === "Escape" && event.target === $("search") && $("search").value)) return; // ends or empties that
  if (event.key === "Escape" && free) {
    if ($("side").classList.contains("open")) closeSide();
    else stop(current);
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    select(newConversation());
  } else if (event.altKey && event.code === "KeyK") {
    event.preventDefault();
    openSide();
    $("search").focus();
  } else if (event.key === "/" && !typing && free) {
    event.preventDefault();
    $("question").focus();
  }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.close !== undefined) button.closest("dialog").close();
  if (button?.dataset.copy !== undefined) say(await copyFrom(button));
});

$("open-side").onclick = () => {
  openSide();
  $("new").focus();
};
$("close-side").onclick = closeSide;
function openSide() {
  $("side").classList.add("open");
  $("open-side").setAttribute("aria-expanded", "true");
}
function closeSide() {
  $("side").classList.remove("open");
  $("open-side").setAttribute("aria-expanded", "false");
}

// ---- begin ----------------------------------------------------------------------------------------------------------
/** Hold the conversations of the key in use. */
function load() {
  return archive.load(keyName()).catch(() => archive.failed("cannotKeep"));
}

/** The conversation of this page's address. */
function addressed() {
  return archive.find(new URLSearchParams(location.hash.slice(1)).get("c"));
}

async function start() {
  await speak(settings.language);
  showSettings(settings, settingsChanged);
  $("status").textContent = t("connecting");
  await load();
  replace(addressed() ?? current);
  showConversation();
  await refreshStatus();
  if (!current.messages.length) showConversation();
  await connect();
  // Other conversations whose answers the server goes on with.
  for (const conversation of archive.conversations) if (!conversation.away) complete(conversation);
}

for (const kind of ["focus", "online"]) {
  window.addEventListener(kind, () => {
    refreshStatus();
    if (models.length) catchUp();
    else connect();
  });
}
window.addEventListener("hashchange", () => select(addressed() ?? current));
window.addEventListener("pagehide", () => {
  const left = [...writing.keys()].filter((each) => archive.has(each));
  if (left.length) saveUnfinished(left);
});
const started = start();
