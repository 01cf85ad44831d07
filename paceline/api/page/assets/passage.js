// A passage in its document, to which a citation links: /passage?id=12. Asks for it as any client does, with the key.

import { request, saveKey } from "./api.js";
import { renderDocument } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const id = new URLSearchParams(location.search).get("id") ?? "";

function part(name, text, className) {
  const element = document.createElement("div");
  element.className = `passage words ${className}`;
  renderDocument(element, name, text);
  return element;
}

async function show() {
  let passage;
  try {
    passage = await request(`v1/passages/${encodeURIComponent(id)}`);
  } catch (error) {
    $("told").textContent = error.message;
    $("key-form").hidden = error.status !== 401;
    if (error.status === 401) $("key").focus();
    return;
  }
  $("key-form").hidden = true;
  document.title = `${passage.document} – Paceline`;
  $("document").textContent = passage.document;
  const where = passage.place ? `, ${passage.place}` : "";
  $("told").textContent = `A document of the ${passage.side}${where}. The passage is marked.`;
  const parts = [...passage.before.map((text) => part(passage.document, text, "")), part(passage.document, passage.text, "cited")];
  $("text").replaceChildren(...parts, ...passage.after.map((text) => part(passage.document, text, "")));
  $("text").querySelector(".cited").scrollIntoView({ block: "center" });
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key").value.trim(), false);
  show();
});

show();
