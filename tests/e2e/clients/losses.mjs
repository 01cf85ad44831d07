// What people may lose without being told: questions, files and settings, in Chromium.

import { answered, ask, begin, deleteFirst, ended, focus, held, lastAnswer, left, models, titles, until } from "./browser.mjs";

const saidIn = ({ input }) => input.map(({ content }) => content);

export const LOSSES = {
  // A question that waits while another conversation is opened, and while its own is deleted.
  async waiting(page, { url }) {
    const bodies = await answered(page);
    await page.goto(url);
    await models(page);
    await ask(page, "Old?");
    const release = await held(page, "**/v1/models");
    await page.goto(url);
    await page.locator("#conversations .open").waitFor();
    await begin(page, "New?");
    await page.locator("#conversations .open", { hasText: "Old?" }).click();
    release();
    await page.locator("#conversations .open", { hasText: "New?" }).waitFor();
    const shown = await page.locator(".question .words").allTextContents();
    await until(page, async () => (await (await fetch("v1/conversations")).json()).data.length === 2);
    return { asked: bodies.map(saidIn), shown, titles: await titles(page) };
  },

  // Answers whose reading fails: by a proxy while the server goes on, by the server, and in another browser, where a question is
  // edited meanwhile.
  async reading(page, { url }) {
    const context = await page.context().browser().newContext();
    try {
      const began = async (route) => { // and its connection is cut
        const data = { ...route.request().postDataJSON(), seed: 1, max_output_tokens: 8, ignore_eos: true, stream: false };
        const response = await (await page.request.post(`${url}v1/responses`, { data })).json();
        await route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify({ type: "response.created", sequence_number: 0, response })}\n\n` });
      };
      const failing = (statuses) => (route) => {
        const status = route.request().method() === "GET" ? statuses.shift() : undefined;
        return status ? route.fulfill({ status, body: "<h1>" }) : route.fallback();
      };
      await page.route("**/v1/responses", began);
      await page.route("**/v1/responses/*", failing([502, 429, 0, 500]));
      await page.goto(url);
      await models(page);
      await ask(page, "One?");
      const proxied = await lastAnswer(page);
      await begin(page, "Two?");
      await page.locator(".answer[data-state=unread] button.on").click();
      await page.locator(".answer").nth(1).and(page.locator("[data-state=done]")).waitFor();
      const again = await lastAnswer(page);
      await until(page, async () => {
        const { data } = await (await fetch("v1/conversations")).json();
        return (await (await fetch(`v1/conversations/${data[0].id}/items?limit=100`)).json()).data.filter(({ id }) => id.endsWith(".done")).length === 2;
      });
      const other = await context.newPage();
      await other.route("**/v1/responses/*", failing([503]));
      await other.goto(url);
      await other.locator("#conversations .open").click();
      await other.locator(".answer .note").waitFor(); // of the second one
      const missing = await other.locator(".answer .note").count();
      await other.locator(".question").first().hover();
      await other.getByLabel("Edit").first().click();
      await other.keyboard.type(" edited");
      await ask(page, "Three?");
      await focus(other);
      await other.locator(".question", { hasText: "Three?" }).waitFor();
      await other.keyboard.type(" on");
      await other.locator(".answer .note").nth(2).waitFor();
      const edited = await other.inputValue(".editing textarea");
      return { proxied, again, missing, edited, notes: await other.locator(".answer .note").allTextContents(), on: await other.locator(".answer button.on").count() };
    } finally {
      await context.close();
    }
  },

  // What fails for a moment, and what two tabs or two formats have at once: the server's models, a file that is being read, a
  // setting, a pasted cell, an answer that is stopped before its id is known.
  async mishaps(page, { url }) {
    let refusals = 2;
    await page.route("**/v1/models", (route) => (refusals-- > 0 ? route.fulfill({ status: 503, body: "" }) : route.fallback()));
    const bodies = await answered(page);
    await page.goto(url);
    await page.locator("#failure .error").waitFor();
    await focus(page);
    await until(page, () => document.querySelectorAll("#failure .error").length === 1);
    await ask(page, "One?");
    const { model } = bodies[0];

    const other = await page.context().newPage();
    await other.goto(url);
    await models(other);
    await page.selectOption("#privacy", "local-only");
    await other.click("#open-settings");
    await other.selectOption("#theme", "dark");
    await other.close();
    await page.reload();
    await models(page);
    const privacy = await page.inputValue("#privacy");
    await page.selectOption("#privacy", "");

    await page.evaluate(() => {
      const clipboardData = new DataTransfer();
      clipboardData.setData("text/plain", "1\t2");
      clipboardData.items.add(new File(["x"], "image.png", { type: "image/png" }));
      document.querySelector("#question").dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
    });
    const pasted = await page.locator("#attached li").count();

    let looks = 0;
    await page.route("**/v1/vector_stores/*/files/*", (route) => (looks++ ? route.fallback() : route.fulfill({ status: 429, body: "" })));
    await page.setInputFiles("#attach-files", { name: "a.md", mimeType: "text/markdown", buffer: Buffer.from("A.") });
    await page.waitForSelector("#attached [data-state=completed]");

    await page.unroute("**/v1/responses/*");
    let id = "";
    let release;
    const released = new Promise((resolve) => (release = resolve));
    await page.route("**/v1/responses", async (route) => {
      const data = { ...route.request().postDataJSON(), max_output_tokens: 4000, ignore_eos: true, stream: false };
      const response = await (await page.request.post(`${url}v1/responses`, { data })).json();
      id = response.id;
      await released;
      await route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify({ type: "response.created", sequence_number: 0, response })}\n\n` });
    });
    await begin(page, "Two?");
    while (!id) await page.waitForTimeout(20);
    await page.click("#stop");
    await page.waitForSelector(".answer[data-state=stopped]");
    release();
    await until(page, async (name) => (await (await fetch(`v1/responses/${name}`)).json()).status === "cancelled", id);
    await page.emulateMedia({ media: "print" });
    const printed = await page.evaluate(() => [document.querySelector("#composer").offsetHeight, document.querySelector("#messages").scrollHeight - document.querySelector("#messages").clientHeight]);
    await page.emulateMedia({ media: "screen" });
    await page.route("**/de.js", (route) => route.abort());
    await page.click("#open-settings");
    await page.selectOption("#language", "de");
    await page.keyboard.press("Escape");
    const spoken = await page.locator("#new").innerText();
    await deleteFirst(page);
    await until(page, async (name) => (await fetch(`v1/responses/${name}`)).status === 404, id);
    await left(page);
    return { model, privacy, pasted, looks, printed, spoken };
  },

  // Files of a conversation: two choices at once, a question before they are read, one that is given up, a reload.
  async files(page, { url }) {
    const bodies = await answered(page);
    const file = (name) => ({ name, mimeType: "text/markdown", buffer: Buffer.from(`${name} says 77.`) });
    const made = [];
    page.on("request", (request) => request.method() === "POST" && request.url().endsWith("/v1/vector_stores") && made.push(request.url()));
    await page.goto(url);
    await models(page);
    const release = await held(page, "**/v1/files", "POST");
    await page.setInputFiles("#attach-files", file("a.md"));
    await page.setInputFiles("#attach-files", file("b\u202edm.c"));
    await begin(page, "Given up?");
    await page.click("#stop");
    const back = await page.inputValue("#question");
    await page.fill("#question", "");
    await begin(page, "What do they say?");
    await page.keyboard.press("Alt+n");
    await ask(page, "Beside?");
    release();
    await page.locator("#conversations .open", { hasText: "What do they say?" }).click();
    await ended(page);
    const names = await page.locator("#attached [data-state=completed] .name").allTextContents();
    const stores = made.length;
    await page.keyboard.press("Alt+n");
    await page.setInputFiles("#attach-files", file("secret.md"));
    await page.waitForSelector("#attached [data-state=completed]");
    await page.reload();
    await page.waitForSelector("#attached [data-state=completed]");
    const again = [await page.textContent("#attached .name"), await titles(page)];
    await deleteFirst(page);
    await page.locator("#conversations .open", { hasText: "Beside?" }).click();
    await page.setInputFiles("#attach-files", file("early.md"));
    await page.waitForSelector("#attached [data-state=completed]");
    await deleteFirst(page);
    await ask(page, "Brief?");
    const late = await held(page, "**/v1/vector_stores", "POST");
    await page.setInputFiles("#attach-files", file("late.md"));
    await deleteFirst(page); // as its store is made
    late();
    await page.locator("#conversations .open", { hasText: "What do they say?" }).click();
    await deleteFirst(page);
    await until(page, async () => { // nothing is left behind
      const all = async (kind) => (await (await fetch(`v1/${kind}`)).json()).data;
      const names = (await all("files")).map(({ filename }) => filename);
      return !/a.md|c$|secret|early|late/m.test(names.join("\n")) && !(await all("vector_stores")).some(({ metadata }) => metadata.conversation);
    });
    return { back, stores, names, again, asked: bodies.map((body) => [...saidIn(body), body.paceline.vector_stores?.length ?? 1]) };
  },

  // What a conversation may hold, in a second browser: characters that are cut, the longest system prompt, halves of one.
  async texts(page, { url }) {
    const context = await page.context().browser().newContext();
    try {
      const seen = [];
      const start = "a".repeat(59);
      for (const [each, question] of [[page, `${start}😀 and so on \ud83d?`], [await context.newPage(), "Again?"]]) {
        const bodies = await answered(each);
        await each.goto(url);
        await models(each);
        if (each === page) await each.click("#open-options");
        else await each.locator("#conversations .open", { hasText: start }).click();
        if (each === page) {
          await each.fill("#o-system", `${"x".repeat(499)}😀${'"a":\n'.repeat(699)}`);
          await each.keyboard.press("Escape");
        }
        const pushed = each.waitForResponse((one) => one.url().endsWith("/items") && one.request().postData()?.includes(".done"));
        await each.evaluate((text) => (document.querySelector("#question").value = text), question);
        await each.press("#question", "Enter");
        await ended(each);
        seen.push({ title: await each.textContent("#title"), system: bodies[0].instructions, said: saidIn(bodies[0]), status: (await pushed).status() });
      }
      return { seen };
    } finally {
      await context.close();
    }
  },

  // Files of conversations with anything in any place: what is taken can be drawn, saved, asked, and is there after a reload.
  // given: so many of them.
  async foreign(page, { url, given }) {
    await page.goto(url);
    await models(page);
    const faults = await page.evaluate(async (rounds) => {
      const { asJson, asMarkdown, fromJson, newAnswer, pathOf, requestBody } = await import("/page/conversation.js");
      const { AnswerView, questionNode } = await import("/page/answer.js");
      const { timeline } = await import("/page/timeline.js");
      const { openSource } = await import("/page/source.js");
      let seed = 1;
      const below = (most) => (seed = (seed * 48271) % 2147483647) % most;
      const odd = () => [null, 5, "INFINITE", "x", true, [], {}, [null], [5], { toString: 5 }, [{ side: [] }], ["x", {}]][below(12)];
      const damaged = (value) => {
        if (!below(8)) return odd();
        if (Array.isArray(value)) return value.map(damaged);
        if (value === null || typeof value !== "object") return value;
        return Object.fromEntries(Object.entries(value).filter(() => below(12)).map(([name, each]) => [name, damaged(each)]));
      };
      const report = {
        strategy: "auto", why: "so", degraded: "device_lost", citations: [{ side: "cloud", document: "a.md", passage: "A b.", score: 0.5, place: "", url: "" }],
        confirmation_needed: [{ id: "a", document: "b" }], energy: { device: { joules: 1, meter: "modelled" } },
        timeline: ["tokens", "drafted", "accepted", "search", "prefill", "round_trips", "sent", "received", "cost_ms", "strategy"].map((kind) => ({ side: "device", kind, of: "a", ms: 1, number: 2, took_ms: 3 })),
      };
      const usage = { input_tokens: 1, output_tokens: 9, total_tokens: 10 };
      const answer = { ...newAnswer(), id: "b", parent: "a", text: "A b.", lanes: "cccc", steps: ["s"], calls: [{ name: "f", arguments: "{}" }], state: "done", report, usage, seconds: 1, model: "fake", context: 100 };
      const whole = { title: "T", pinned: true, updated: 1, leaf: "b", system: "Be.", temperature: 1, messages: [{ id: "a", parent: null, role: "user", text: "Q" }, answer] };
      const dialog = document.querySelector("#source");
      const actions = { versions: () => [], openSource: (citation, of) => openSource(dialog, citation, of, "device") };
      const faults = [];
      for (let round = 0; round < rounds; round += 1) {
        const file = { kind: "paceline conversations", version: 1, conversations: [damaged(whole), whole] };
        try {
          const found = fromJson(JSON.stringify(file).replaceAll('"INFINITE"', "1e999"));
          if (found.at(-1).title !== "T" || !found.every(({ title }) => typeof title === "string")) faults.push(["title", file]);
          for (const each of found) {
            if (each.messages.length && !pathOf(each).length) faults.push(["path", file]);
            const { instructions = "", temperature = 0 } = requestBody(each, { model: "fake" }, [], false);
            if (typeof instructions !== "string" || typeof temperature !== "number") faults.push(["options", file]);
            for (const message of each.messages) {
              if (message.role === "user") questionNode(message, [], () => {});
              else {
                const view = new AnswerView(message, actions);
                view.show();
                timeline(message.report);
                view.node.querySelector(".source")?.click();
                dialog.close();
              }
            }
            asMarkdown(each, { you: "", answer: "", sources: "" });
            structuredClone(each);
          }
          fromJson(asJson(found));
        } catch (error) {
          faults.push([String(error.stack), file]);
        }
      }
      for (const other of [{ kind: "paceline conversations", version: 99, conversations: [] }, { kind: "x", version: 1, conversations: [] }]) {
        try {
          fromJson(JSON.stringify(other));
          faults.push(["taken", other]);
        } catch {
          continue; // as it should
        }
      }
      return faults.slice(0, 3);
    }, given);
    return { faults };
  },

  // More text than a request may hold: it is kept in parts, and the next question goes with the last of it.
  async large(page, { url }) {
    const bodies = await answered(page);
    await page.goto(url);
    await models(page);
    const text = "ä".repeat(30_000);
    const messages = Array.from({ length: 20 }, (_, at) => ({ role: at % 2 ? "assistant" : "user", text: `${at}${text}` }));
    const beyond = { title: "Beyond", messages: [{ role: "user", text: "x".repeat(1_100_000) }, { role: "user", text: "Fits" }] };
    const kept = async (conversation) => {
      const found = (await (await fetch("v1/conversations")).json()).data.find(({ metadata }) => metadata.title === conversation.title);
      if (!found) return false;
      const { data } = await (await fetch(`v1/conversations/${found.id}/items?limit=100`)).json();
      return data.length === conversation.count;
    };
    const take = async (conversation) => {
      const file = { kind: "paceline conversations", version: 1, conversations: [conversation] };
      await page.setInputFiles("#import-file", { name: "a.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(file)) });
    };
    await take({ title: "Long", messages });
    await until(page, kept, { title: "Long", count: 20 });
    await ask(page, "And now?");
    const input = bodies[0].input;
    await until(page, kept, { title: "Long", count: 22 });
    const well = await page.textContent("#unkept");
    await take(beyond);
    await until(page, kept, { title: "Beyond", count: 2 });
    await page.waitForFunction(() => document.querySelector("#unkept").textContent);
    const told = await page.textContent("#unkept");
    return { roles: input.map(({ role }) => role), last: input.at(-1).content, bytes: JSON.stringify(input).length, well, told };
  },

  // A key that no header may hold; Esc where it means something else; the address of another conversation.
  async fingers(page, { url }) {
    const bodies = await answered(page);
    await page.goto(url);
    await models(page);
    await page.click("#open-settings");
    await page.click("#change-key");
    await page.fill("#key-field", "sk-“abc”");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelector("#key-error").textContent);
    const refused = await page.textContent("#key-error");
    await page.keyboard.press("Escape");
    await ask(page, "One?");
    const address = page.url();
    await page.keyboard.press("Alt+n");
    await page.route("**/v1/responses", () => {}); // mute
    await begin(page, "Two?");
    await page.waitForSelector(".answer[data-state=writing]");
    await page.fill("#search", "two");
    await page.keyboard.press("Escape");
    await page.focus("#question");
    await page.evaluate(() => document.querySelector("#question").dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", isComposing: true, bubbles: true })));
    const { state } = await lastAnswer(page);
    const search = await page.inputValue("#search");
    await page.evaluate((other) => (location.href = other), address);
    await page.locator("#title", { hasText: "One?" }).waitFor();
    await page.evaluate(() => (location.hash = "c=unknown"));
    await page.waitForFunction((own) => location.href === own, address);
    return { refused, state, search, title: await page.textContent("#title"), asked: bodies.length };
  },
};
