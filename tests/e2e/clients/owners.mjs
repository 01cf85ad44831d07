// Conversations in Chromium: whose they are, and what is left of those that were deleted.

import { ask, begin, deleteFirst, ended, focus, growing, linked, seeded, titles, until } from "./browser.mjs";

/** All that the page keeps of an owner. */
function stored(page, owner) {
  return page.evaluate(async (name) => (await import("/page/storage.js")).loadConversations(name), owner);
}

function emptied(page, owner) {
  return until(page, async (name) => !(await (await import("/page/storage.js")).loadConversations(name)).length, owner);
}

async function enter(page, key, lasting = false) {
  await page.waitForSelector("#key[open]");
  await page.setChecked("#keep-key", lasting);
  await page.fill("#key-field", key);
  await page.keyboard.press("Enter");
  await page.waitForSelector("#key:not([open])", { state: "attached" });
  await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
}

async function changeKey(page, key) {
  await page.click("#open-settings");
  await page.click("#change-key");
  await Promise.all([page.waitForEvent("load"), enter(page, key).catch(() => {})]); // the page begins anew
  await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
}

export const OWNERS = {
  // Conversations that are deleted before the server has kept them, while it does not answer, and before it has answered.
  async forgotten(page, { url }) {
    const status = async (path) => (await page.request.get(`${url}v1/${path}`)).status();
    const deleted = () => page.waitForResponse((each) => each.request().method() === "DELETE" && each.url().includes("/v1/responses/"));
    const refuse = (route) => (route.request().method() === "POST" ? route.abort() : route.continue());
    const down = (route) => route.abort();
    const seen = {};
    await page.goto(url);
    await linked(page);
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    await page.evaluate(async () => (await import("/page/storage.js")).saveConversation({ id: "foreign", owner: "another", title: "Foreign", messages: [] }));
    await page.route("**/v1/conversations", refuse);
    await ask(page, "One?");
    const [one] = await stored(page, "");
    seen.one = [one.server, await status(`responses/${one.messages[1].response}`)];
    await Promise.all([deleted(), deleteFirst(page)]);
    seen.one.push(await status(`responses/${one.messages[1].response}`));
    await page.unroute("**/v1/conversations", refuse);

    const pushed = page.waitForResponse((each) => each.url().endsWith("/items") && each.request().postData()?.includes(".done"));
    await ask(page, "Two?");
    await pushed;
    const [two] = await stored(page, "");
    await page.route("**/v1/**", down);
    await deleteFirst(page);
    await page.waitForFunction(() => document.querySelector("#unkept").textContent.startsWith("Deleted here, and at the server once it answers"));
    await page.reload();
    await linked(page);
    seen.two = [await titles(page), await status(`conversations/${two.server}`), (await stored(page, "")).length];
    await page.unroute("**/v1/**", down);
    await Promise.all([deleted(), focus(page)]);
    await emptied(page, "");
    seen.two.push(await status(`conversations/${two.server}`), await status(`responses/${two.messages[1].response}`));

    let release;
    const held = new Promise((resolve) => (release = resolve));
    await page.route("**/v1/responses", async (route) => {
      await held;
      await route.continue();
    });
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0); // it has connected again
    await begin(page, "Three?");
    await page.waitForSelector(".answer[data-state=writing]");
    await deleteFirst(page);
    const [gone] = await Promise.all([deleted(), release()]);
    seen.three = [gone.status(), await status(gone.url().split("/v1/")[1])];
    await page.click("#open-settings");
    await page.click("#delete-all");
    return { ...seen, foreign: (await stored(page, "another")).length };
  },

  // Two keys in one browser, in two tabs. given: the second key.
  async keys(page, { url, key, given: other }) {
    const kept = async (of) => {
      const { data } = await (await page.request.get(`${url}v1/conversations`, { headers: { authorization: `Bearer ${of}` } })).json();
      return data.map(({ metadata }) => metadata.title).sort();
    };
    const sent = new Map([page, await page.context().newPage()].map((each) => [each, []]));
    const [, tab] = sent.keys();
    for (const [each, keys] of sent) {
      each.on("request", (request) => request.method() === "POST" && keys.push(request.headers().authorization));
    }
    const fields = await seeded(page);
    await page.goto(`${url}docs`);
    await page.evaluate(async () => { // without a key
      const { newConversation } = await import("/page/conversation.js");
      const { saveConversation, saveUnfinished } = await import("/page/storage.js");
      await saveConversation({ ...newConversation(), id: "old", title: "Old", updated: 2 });
      saveUnfinished([{ ...newConversation(), id: "left", title: "Left", updated: 1 }]);
    });
    const digests = await page.evaluate(async () => {
      const { sha256 } = await import("/page/digest.js");
      const texts = Array.from({ length: 200 }, (_, size) => "ä".repeat(size % 3) + "k".repeat(size));
      const right = async (text) => {
        const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
        return sha256(text) === [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
      };
      return (await Promise.all(texts.map(right))).filter(Boolean).length;
    });
    await page.goto(url);
    await enter(page, key);
    await page.waitForSelector("#conversations li");
    const first = await titles(page);
    Object.assign(fields, { max_output_tokens: 4000, ignore_eos: true });
    await begin(page, "Mine?");
    await growing(page);
    for (const name of ["max_output_tokens", "ignore_eos"]) delete fields[name];
    await changeKey(page, other);
    const changed = [await titles(page), await page.locator(".message").count(), await page.locator("#stop").isVisible()];
    await ask(page, "Other?");
    await tab.goto(url);
    await enter(tab, key, true);
    await tab.locator("#conversations .open", { hasText: "Mine?" }).click();
    await growing(tab); // it goes on where the page that was left had it
    await tab.click("#stop");
    await ended(tab);
    await focus(page);
    await page.keyboard.press("Alt+n");
    await ask(page, "Again?");
    await tab.evaluate((name) => localStorage.setItem("paceline.key", name), other); // as another tab does
    sent.get(tab).length = 0;
    await tab.keyboard.press("Alt+n");
    const pushed = tab.waitForResponse((each) => each.url().endsWith("/items") && each.request().postData()?.includes(".done"));
    await ask(tab, "Still mine?");
    await pushed;
    const tabs = [await titles(page), await titles(tab)];
    const names = await page.evaluate(async () => JSON.stringify([await new Promise((resolve) => {
      indexedDB.open("paceline").onsuccess = ({ target }) => {
        target.result.transaction("conversations").objectStore("conversations").getAll().onsuccess = (all) => resolve(all.target.result.map(({ owner }) => owner));
      };
    }), { ...localStorage, "paceline.key": "" }]));
    return {
      digests, first, changed, tabs, kept: [await kept(key), await kept(other)], told: names.includes(key) || names.includes(other),
      sent: [...sent.values()].map((keys) => [...new Set(keys.map((each) => [key, other].indexOf(each?.slice("Bearer ".length))))]),
    };
  },
};
