// Copies of one conversation in two tabs and in two browsers, in Chromium: what either has is merged.

import { answered, ask, begin, deleteFirst, ended, focus, growing, held, left, models, seeded, titles, until } from "./browser.mjs";

const file = (name) => ({ name, mimeType: "text/markdown", buffer: Buffer.from(`${name} says 77.`) });
const names = (page) => page.locator("#attached .name").allTextContents();
const read = ({ paceline }) => paceline.vector_stores?.length ?? 1;
const questions = (page) => page.locator(".question .words").allTextContents();
const open = (page, title) => page.locator("#conversations .open", { hasText: title }).click();

/** Run `work` with a second page, of the same browser or of another one, and bodies of what either asks. */
async function beside(page, url, same, work) {
  const context = same ? page.context() : await page.context().browser().newContext();
  const other = await context.newPage();
  try {
    const bodies = await Promise.all([page, other].map(answered));
    await page.goto(url);
    await models(page);
    return await work(other, ...bodies);
  } finally {
    await (same ? other : context).close();
  }
}

async function attach(page, name) {
  await page.setInputFiles("#attach-files", file(name));
  await page.locator("#attached [data-state=completed]", { hasText: name }).waitFor();
}

async function rename(page, title) {
  await page.click("#open-options");
  await page.fill("#o-title", title);
  await page.keyboard.press("Escape");
}

/** Wait until the server has this of the page's conversations, of which `kept` tells. */
function keeps(page, wanted) {
  return until(page, async (text) => {
    const all = (await (await fetch("v1/conversations")).json()).data.filter(({ metadata }) => metadata.made_by === "paceline page");
    const counts = await Promise.all(all.map(async ({ id }) => (await (await fetch(`v1/conversations/${id}/items`)).json()).data?.length)); // it may just be deleted
    return all.map(({ metadata: { title } }, at) => `${title}: ${counts[at]}`).join() === text;
  }, wanted);
}

export const COPIES = {
  // Three copies, changed and merged in any order: at the end all are alike. given: so many rounds.
  async merged(page, { url, given }) {
    await page.goto(url);
    return page.evaluate(async (rounds) => {
      const { add, change, FIELDS, merge, newAnswer, newConversation, pathOf } = await import("/page/conversation.js");
      let seed = 1;
      const below = (most) => (seed = (seed * 48271) % 2147483647) % most;
      const told = ({ messages, stores, updated, ...each }) => JSON.stringify([FIELDS.map((name) => each[name] ?? null), stores, updated, messages.map((one) => JSON.stringify(one)).sort()]);
      const now = Date.now;
      const faults = [];
      for (let round = 0; round < rounds; round += 1) {
        const first = newConversation();
        const copies = [first, structuredClone(first), structuredClone(first)];
        const [clocks, steps] = [copies.map(() => below(10)), []];
        let number = 0;
        const changes = [
          (copy) => change(copy, { [FIELDS[below(FIELDS.length)]]: below(4) }),
          (copy) => add(copy, { role: "user", text: `${number}`, id: `q${number}` }),
          (copy) => add(copy, { ...newAnswer(), id: `a${number}`, response: "r" }),
          (copy) => copy.messages.filter(({ state }) => state === "writing").slice(0, 1).forEach((one) => Object.assign(one, { sequence: (number += 1), text: `${number}` })),
          (copy) => copy.stores.push(`vs_${number}`),
        ];
        for (let step = 0; step < 12; step += 1) {
          const [at, from] = [below(3), below(3)];
          number += 1;
          Date.now = () => clocks[at] + number;
          if (below(3)) changes[below(changes.length)](copies[at]);
          else merge(copies[at], structuredClone(copies[from]));
        }
        // A change counts that is made with the others at hand, whatever its clock says.
        for (const copy of copies.slice(1)) merge(copies[0], structuredClone(copy));
        Date.now = () => 0;
        change(copies[0], { title: "last", system: "" });
        for (const [at, from] of [[1, 2], [2, 0], [1, 0], [0, 1], [2, 1]]) merge(copies[at], structuredClone(copies[from]));
        if (new Set(copies.map(told)).size > 1 || copies[2].title !== "last") faults.push(copies.map(told));
        for (const copy of copies) if (copy.messages.length && !pathOf(copy).length) faults.push(["path", copy]);
      }
      Date.now = now;
      return { faults: faults.slice(0, 3) };
    }, given);
  },

  // A conversation of another browser whose messages do not come: nothing is asked without them, nor are others forgotten.
  unread: (page, { url }) => beside(page, url, false, async (other, _, bodies) => {
    for (const question of ["Gamma?", "Alpha?"]) {
      await page.keyboard.press("Alt+n");
      await ask(page, question);
    }
    await keeps(page, "Alpha?: 2,Gamma?: 2");
    const refuse = (route) => (route.request().method() === "GET" ? route.fulfill({ status: 503, body: "<h1>" }) : route.fallback());
    await other.route("**/v1/conversations/*/items*", refuse);
    await other.goto(url);
    await models(other);
    await open(other, "Alpha?");
    await other.locator("#failure .error").waitFor();
    await other.fill("#question", "More?");
    await other.keyboard.press("Enter");
    await other.waitForSelector("#send:not([hidden])");
    const refused = [await other.inputValue("#question"), bodies.length, await other.textContent("#failure .error")];
    await other.unroute("**/v1/conversations/*/items*", refuse);
    const release = await held(other, "**/v1/conversations/*/items*");
    await other.click("#failure button");
    await other.fill("#question", "");
    await begin(other, "More?"); // while they come
    await focus(other);
    release();
    await other.locator(".answer").nth(1).waitFor();
    await ended(other);
    const asked = bodies[0].input.map(({ content }) => content);
    await keeps(other, "Alpha?: 4,Gamma?: 2");
    return { refused, asked, shown: await questions(other), listed: await titles(other) };
  }),

  // What two browsers change of one conversation, which nobody looks at anew: title and system prompt, files, a question.
  changes: (page, { url }) => beside(page, url, false, async (other, bodies) => {
    await ask(page, "One?");
    await keeps(page, "One?: 2");
    await other.goto(url);
    await open(other, "One?");
    await other.locator(".answer").waitFor();
    await attach(other, "b.md");
    await other.click("#open-options");
    await other.fill("#o-title", "Renamed");
    await other.fill("#o-system", "Answer in Latin.");
    await other.keyboard.press("Escape");
    await keeps(page, "Renamed: 2");
    await ask(page, "Two?");
    await keeps(page, "Renamed: 4");
    await focus(other);
    await other.locator(".question", { hasText: "Two?" }).waitFor();
    const seen = { instructions: bodies[1].instructions, stores: read(bodies[1]) - read(bodies[0]), titles: await titles(other), files: await names(other) };
    await attach(other, "c.md");
    await deleteFirst(page); // which knows nothing of that
    await left(page);
    return seen;
  }),

  // A file that is attached in one tab, in another one; and a store that the server has no more.
  attached: (page, { url }) => beside(page, url, true, async (other, before, bodies) => {
    await ask(page, "One?");
    await other.goto(url);
    await models(other);
    await open(other, "One?");
    await attach(page, "a.md");
    await ask(other, "Two?");
    const stores = read(bodies[0]) - read(before[0]);
    await attach(other, "b.md");
    await focus(page);
    await page.locator("#attached .name").nth(1).waitFor();
    const seen = { stores, files: [await names(page), await names(other)].map((each) => each.sort()) };
    await page.evaluate(async () => {
      const all = async (kind) => (await (await fetch(`v1/${kind}`)).json()).data;
      const lost = (await all("files")).filter(({ filename }) => /^[ab]\.md$/.test(filename)).map(({ id }) => `files/${id}`);
      for (const { id, metadata } of await all("vector_stores")) if (metadata.conversation) lost.push(`vector_stores/${id}`);
      for (const path of lost) await fetch(`v1/${path}`, { method: "DELETE" });
    });
    await focus(page);
    await page.locator("#attached [data-state=failed]").waitFor();
    await attach(page, "new.md");
    await ask(page, "Three?");
    const lost = await page.textContent("#attached [data-state=failed] .state");
    const again = (await names(page)).filter((name) => name.endsWith(".md"));
    await deleteFirst(page);
    await left(page);
    return { ...seen, lost, again };
  }),

  // What is changed, asked and deleted in one tab, while another one has answers written that are kept in this browser alone.
  async overwritten(page, { url }) {
    const other = await page.context().newPage();
    other.on("dialog", (dialog) => dialog.accept());
    const fields = await seeded(page);
    await answered(other);
    Object.assign(fields, { max_output_tokens: 4000, ignore_eos: true });
    await page.goto(url);
    await models(page);
    await page.click("#open-settings");
    await page.selectOption("#keep", "browser");
    await page.keyboard.press("Escape");
    for (const question of ["Deleted?", "Kept?"]) {
      await page.keyboard.press("Alt+n");
      await begin(page, question);
      await growing(page);
    }
    const saved = (title) => until(page, async (name) => (await (await import("/page/storage.js")).loadConversations("")).some(({ title: one, messages }) => one === name && messages[1]?.text.length > 3), title);
    for (const title of ["Deleted?", "Kept?"]) await saved(title);
    await other.goto(url);
    await models(other);
    await other.fill("#search", "Deleted?");
    await deleteFirst(other);
    await other.fill("#search", "");
    await open(other, "Kept?");
    await rename(other, "Renamed");
    await ask(other, "Another?");
    await other.close();
    await page.locator("#conversations .open", { hasText: "Kept?" }).click();
    await page.click("#stop");
    await ended(page);
    await page.reload();
    await models(page);
    return { titles: await titles(page), questions: await questions(page) };
  },

  // A conversation is one, although the server was asked twice to keep it; a question that is too long for it keeps its place.
  once: (page, { url }) => beside(page, url, false, async (other) => {
    let lost = 0;
    await page.route("**/v1/conversations", async (route) => {
      if (route.request().method() !== "POST" || (lost += 1) > 1) return route.fallback();
      await route.fetch();
      return route.abort();
    });
    await ask(page, "One?");
    await page.waitForFunction(() => document.querySelector("#unkept").textContent);
    await ask(page, "Two?");
    await keeps(page, "One?: 4,One?: 0");
    await focus(page);
    await keeps(page, "One?: 4");
    await page.fill("#question", "x".repeat(1_100_000));
    await page.keyboard.press("Enter");
    await page.locator(".answer").nth(2).waitFor();
    await keeps(page, "One?: 6");
    await other.goto(url);
    await open(other, "One?");
    await other.locator(".answer").nth(2).waitFor();
    lost = -9;
    await page.keyboard.press("Alt+n");
    await ask(page, "Lost?");
    await page.waitForFunction(() => document.querySelector("#unkept").textContent.startsWith("The server does not keep"));
    lost = 9;
    await deleteFirst(page); // before this browser knows that the server has it
    await keeps(page, "One?: 6");
    return { titles: [await titles(page), await titles(other)], sizes: (await questions(other)).map(({ length }) => length) };
  }),
};
