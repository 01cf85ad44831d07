// What the tests of the web page share: a Chromium that records every error and every host it was made to ask.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const AXE = readFileSync(fileURLToPath(import.meta.resolve("axe-core/axe.min.js")), "utf8");
const TIMEOUT = 60_000; // ms
const PAUSE = 50; // ms between two looks

/** A browser for many runs of `inBrowser`. */
export function launched(executablePath) {
  // The tests' containers run as root, where Chromium's sandbox cannot start, and have no GPU: to play one costs as much.
  return chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"] });
}

/** Run `work(page)` in a fresh profile; returns its result with what was seen: errors and foreign hosts. */
export async function inBrowser(browser, url, work) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 } });
  try {
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    await forgotten(context.request, url);
    const page = await context.newPage();
    seldom(page);
    page.setDefaultTimeout(TIMEOUT);
    const seen = { errors: [], hosts: [], dialogs: [] };
    const own = new URL(url).origin;
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && seen.errors.push(`${message.text()} ${message.location().url}`));
    page.on("pageerror", (error) => seen.errors.push(error.message));
    page.on("request", (request) => request.url().startsWith(own) || seen.hosts.push(request.url()));
    page.on("dialog", (dialog) => {
      seen.dialogs.push(dialog.message());
      dialog.accept();
    });
    return { ...(await work(page)), ...seen };
  } finally {
    await context.close();
  }
}

/** Have pages look 20 times a second for what is waited for: not with each frame, which there would not be otherwise. */
function seldom(page) {
  const pages = Object.getPrototypeOf(page);
  const { waitForFunction } = pages;
  if (!waitForFunction.seldom) pages.waitForFunction = function (said, given, options) {
    return waitForFunction.call(this, said, given, { polling: PAUSE, ...options });
  };
  pages.waitForFunction.seldom = true;
}

/** Delete the conversations that earlier runs left at the server, which every browser would show. */
async function forgotten(request, url) {
  const answer = await request.get(`${url}v1/conversations?limit=100`);
  for (const { id } of answer.ok() ? (await answer.json()).data : []) await request.delete(`${url}v1/conversations/${id}`);
}

/** Delete the first conversation of the list with its menu. */
export async function deleteFirst(page) {
  await page.locator("#conversations li").first().hover();
  await page.locator("#conversations .more").first().click();
  await page.click("#menu [data-do=delete]");
}

/** The events of a response, as a server sends them. pieces: [text, lane]; end: fields of the last event's response. */
export function streamOf(pieces, end = {}) {
  let number = 0;
  const event = (type, more) => `event: ${type}\ndata: ${JSON.stringify({ type, sequence_number: number++, ...more })}\n\n`;
  return [
    event("response.created", { response: { id: "resp_1" } }),
    ...pieces.map(([delta, lane]) => event("response.output_text.delta", { delta, paceline: { lane } })),
    event("response.completed", { response: { status: "completed", ...end } }),
  ].join("");
}

/** Wait until what needs a key is there. */
export const models = (page) => page.waitForFunction(() => document.querySelector("#model").options.length > 0);
export const titles = (page) => page.locator("#conversations .open").allTextContents();

/** Hold requests for these paths until the function that is returned is called. */
export async function held(page, path, method = "GET") {
  let release;
  const released = new Promise((resolve) => (release = resolve));
  await page.route(path, async (route) => {
    if (route.request().method() === method) await released;
    await route.fallback();
  });
  return release;
}

/** Bodies of the requests for an answer, each of which is answered at once. */
export async function answered(page) {
  const bodies = [];
  await page.route("**/v1/responses", (route) => {
    bodies.push(route.request().postDataJSON());
    return route.fulfill({ contentType: "text/event-stream", body: streamOf([["So.", "cloud"]]) });
  });
  await page.route("**/v1/responses/*", (route) => route.fulfill({ json: {} })); // of which the server knows nothing
  return bodies;
}

/** Wait until the server has no file of a conversation. */
export const left = (page) => until(page, async () => {
  const all = async (kind) => (await (await fetch(`v1/${kind}`)).json()).data;
  return !(await all("vector_stores")).some(({ metadata }) => metadata.conversation) && !(await all("files")).some(({ filename }) => /^(\w|new)\.md$/.test(filename));
});

export function focus(page) {
  return page.evaluate(() => window.dispatchEvent(new Event("focus")));
}

export async function growing(page) {
  await page.waitForFunction(() => {
    const last = [...document.querySelectorAll(".answer")].at(-1);
    return last?.dataset.state === "writing" && last.innerText.trim().length > 3;
  });
}

/** Rules that axe-core finds broken with an impact of at least "serious", with the elements at fault. */
export async function accessibilityFaults(page) {
  if (!(await page.evaluate(() => Boolean(window.axe)))) await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run({ resultTypes: ["violations"] }));
  return violations
    .filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).join(", ")}`);
}

export async function linked(page) {
  await page.waitForFunction(() => document.querySelector("#status").dataset.linked === "true");
}

/** Wait until the page says so: `waitForFunction` takes a promise for a yes. */
export async function until(page, said, given) {
  while (!(await page.evaluate(said, given))) await new Promise((later) => setTimeout(later, PAUSE));
}

/** Ask a question with the keyboard alone, and wait until the answer has ended. */
export async function ask(page, question) {
  await begin(page, question);
  await ended(page);
}

/**
 * Give each request for an answer a known seed, since the page names none: with this one answers are long and cite both
 * sides. What is put into the returned object is sent with it.
 */
export async function seeded(page) {
  const fields = { seed: 1 };
  await page.route("**/v1/responses", (route) =>
    route.continue({ postData: { ...route.request().postDataJSON(), ...fields } }));
  return fields;
}

export async function begin(page, question) {
  await page.focus("#question");
  await page.keyboard.type(question);
  await page.keyboard.press("Enter");
}

export async function ended(page) {
  await page.waitForFunction(() => {
    const last = [...document.querySelectorAll(".answer")].at(-1);
    return last !== undefined && last.dataset.state !== "writing" && document.querySelector("#stop").hidden;
  });
}

/** What the last answer shows. */
export function lastAnswer(page) {
  return page.evaluate(() => {
    const node = [...document.querySelectorAll(".answer")].at(-1);
    const texts = (selector) => [...node.querySelectorAll(selector)].map((each) => each.textContent);
    return {
      text: node.querySelector(".words").innerText,
      state: node.dataset.state,
      cloud: texts(".lane-cloud").join(""),
      device: texts(".lane-device").join(""),
      sources: texts(".source"),
      notes: texts(".note"),
    };
  });
}
