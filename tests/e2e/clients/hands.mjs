// What hands do to the page, and what it says when a piece of it fails, in Chromium.

import { ask, lastAnswer, streamOf } from "./browser.mjs";

const models = (page) => page.waitForFunction(() => document.querySelector("#model").options.length > 0);

export const HANDS = {
  // A long conversation on paper, by somebody who reads dark pages: its pages, what is on them, and their colour.
  async print(page, { url }) {
    await page.emulateMedia({ colorScheme: "dark" });
    await page.goto(url);
    await models(page);
    const messages = Array.from({ length: 60 }, (_, at) => ({ role: at % 2 ? "assistant" : "user", text: "words and words ".repeat(30), state: "done" }));
    const file = { kind: "paceline conversations", version: 1, conversations: [{ title: "Long", messages }] };
    await page.setInputFiles("#import-file", { name: "a.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(file)) });
    await page.waitForFunction(() => document.querySelectorAll(".answer").length === 30);
    const pages = (await page.pdf()).toString("latin1").match(/\/Type\s*\/Page\b/g).length;
    await page.emulateMedia({ media: "print", colorScheme: "dark" });
    return page.evaluate((pages) => {
      const shown = [...document.querySelectorAll("#side, #composer, #status, header button, .actions, #title, .question, .answer")].filter((each) => each.checkVisibility());
      const { clientHeight, scrollHeight } = document.querySelector("#messages");
      return { pages, cut: scrollHeight - clientHeight, back: getComputedStyle(document.body).backgroundColor, shown: [...new Set(shown.map((each) => each.id || each.className))] };
    }, pages);
  },

  // A browser that speaks German, while the file of that language does not come, nor later any other of the page.
  async pieces(page, { url }) {
    const timeline = [{ side: "cloud", kind: "tokens", ms: 5, number: 1 }, { side: "cloud", kind: "tokens", ms: 9, number: 2 }];
    const body = streamOf([["So.", "cloud"]], { paceline: { strategy: "autoregressive", timeline } });
    await page.route("**/v1/responses", (route) => route.fulfill({ contentType: "text/event-stream", body }));
    await page.addInitScript(() => Object.defineProperty(navigator, "languages", { get: () => ["de-DE"] }));
    await page.route("**/page/de.js", (route) => route.abort());
    await page.goto(url);
    await models(page);
    await page.route("**/page/*.js", (route) => route.abort());
    await ask(page, "Hallo?");
    await page.locator(".written summary").click();
    await page.locator(".written figure.timeline").waitFor();
    return { lang: await page.getAttribute("html", "lang"), word: await page.textContent("#new"), text: (await lastAnswer(page)).text };
  },

  // A call with a long argument, in an answer; a table of a timeline; an error before any question.
  async layout(page, { url }) {
    await page.goto(url);
    await models(page);
    return page.evaluate(async () => {
      const { AnswerView } = await import("/page/answer.js");
      const { table, make } = await import("/page/elements.js");
      const messages = document.querySelector("#messages");
      const error = make("p", { className: "error", textContent: "Short." });
      messages.prepend(error);
      const aside = error.getBoundingClientRect().left - messages.querySelector(".welcome").getBoundingClientRect().left;
      const answer = { text: "So.", lanes: "...", state: "done", calls: [{ name: "find", arguments: "x".repeat(300) }] };
      const view = new AnswerView(answer, { versions: () => [] });
      view.show();
      messages.replaceChildren(view.node);
      view.node.querySelector("details").open = true;
      const rows = table("T", ["what", "side", "number"], [["a", "b", "1"], ["c", "d", "2"]]);
      messages.append(make("figure", { className: "timeline" }, rows));
      const aligned = (row) => [...row.cells].map((each) => getComputedStyle(each).textAlign);
      return { sideways: messages.scrollWidth - messages.clientWidth, error: aside, heads: aligned(rows.rows[0]), cells: aligned(rows.rows[1]) };
    });
  },

  // What a passage shares with answers. given: the passage and those.
  async shared(page, { url, given }) {
    await page.goto(url);
    return page.evaluate(async ([passage, ...answers]) => {
      const { sharedSpan } = await import("/page/source.js");
      return { marked: answers.map((answer) => passage.slice(...(sharedSpan(passage, answer) ?? [0, 0]))) };
    }, given);
  },

  // An answer with its timeline, in German; a source without a name.
  async german(page, { url }) {
    await page.addInitScript(() => Object.defineProperty(navigator, "languages", { get: () => ["de-DE"] }));
    await page.goto(url);
    await models(page);
    return page.evaluate(async () => {
      const { AnswerView } = await import("/page/answer.js");
      const timeline = [{ side: "cloud", kind: "tokens", ms: 5, number: 1 }, { side: "cloud", kind: "tokens", ms: 89, number: 4 }];
      const report = { strategy: "autoregressive", timeline, citations: [{ side: "device", document: "" }] };
      const view = new AnswerView({ text: "So.", lanes: "cc.", state: "done", report, usage: { output_tokens: 5 }, seconds: 0.1 }, { versions: () => [] });
      view.show();
      document.querySelector("#messages").replaceChildren(view.node);
      const details = view.node.querySelector(".written");
      const unfolded = new Promise((resolve) => details.addEventListener("toggle", () => resolve(details.querySelector(".facts > :nth-child(2) dd").textContent)));
      details.open = true;
      const of = (selector) => view.node.querySelector(selector).textContent;
      return { unfolded: await unfolded, folded: of(".written .summary"), source: of(".source .name"), share: of(".shares > span:last-child") };
    });
  },
};
