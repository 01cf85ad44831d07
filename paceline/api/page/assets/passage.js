// A passage in its document, to which a citation links: /passage?id=12. Asks for it as any client does, with the key.

import { request, saveKey } from "./api.js";
import { legible } from "./elements.js";
import { showPassage } from "./source.js";

const $ = (id) => document.getElementById(id);
const id = new URLSearchParams(location.search).get("id") ?? "";

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
  const name = legible(passage.document);
  document.title = `${name} – Paceline`;
  $("document").textContent = name;
  const where = passage.place ? `, ${passage.place}` : "";
  $("told").textContent = `A document of the ${passage.side}${where}. The passage is marked.`;
  showPassage($("text"), passage).scrollIntoView({ block: "center" });
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key").value.trim(), false);
  show();
});

show();
