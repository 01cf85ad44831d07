// The dashboard and the timeline in Chromium: what they show, and the answers of the server that they show it of.

import { readFileSync } from "node:fs";
import { accessibilityFaults } from "./browser.mjs";

const LOOKS = { light: ["light", 1200], dark: ["dark", 1200], narrow: ["light", 360] };

/** Faults that axe-core finds in each look, with the width of what is wider than the narrow one. */
async function looks(page) {
  const seen = { faults: [], wide: 0 };
  for (const [name, [colorScheme, width]] of Object.entries(LOOKS)) {
    await page.emulateMedia({ colorScheme });
    await page.setViewportSize({ width, height: 800 });
    seen.faults.push(...(await accessibilityFaults(page)).map((fault) => `${name}: ${fault}`));
    if (name === "narrow") seen.wide = await page.evaluate(() => document.documentElement.scrollWidth);
  }
  return seen;
}

export const PICTURES = {
  // The dashboard's figures with the answer of /metrics that they are of; timelines. given: bodies of answers to be asked for.
  async dashboard(page, { url, given }) {
    const reports = [];
    for (const data of given) reports.push((await (await page.request.post(`${url}v1/chat/completions`, { data })).json()).paceline);
    let text = "";
    page.on("response", async (answer) => {
      if (answer.url().endsWith("/metrics")) text = await answer.text();
    });
    await page.goto(`${url}dashboard`);
    await page.waitForFunction(() => document.querySelectorAll(".spark polyline").length > 0); // read twice
    await page.click("#pause");
    await page.waitForTimeout(0);
    const figures = await page.evaluate(() => Object.fromEntries([...document.querySelectorAll("[data-figure]")].map(({ dataset }) => [dataset.figure, Number(dataset.value)])));
    const rows = await page.evaluate(() => [...document.querySelectorAll("#panels tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent)));
    const [file] = await Promise.all([page.waitForEvent("download"), page.click("text=Save as CSV")]);
    const csv = readFileSync(await file.path(), "utf8");
    const seen = await looks(page);
    const shown = await timelines(page, url, reports);
    const after = await looks(page);
    return { reports, text, figures, rows, csv, shown, faults: [...seen.faults, ...after.faults], wide: Math.max(seen.wide, after.wide) };
  },

  // A dashboard whose first answer is a proxy's page, which is read once, and then loses the server.
  async lost(page, { url }) {
    const answers = [(route) => route.fulfill({ contentType: "text/html", body: "<h1>Log in" }), (route) => route.continue(), (route) => route.abort()];
    await page.route("**/metrics", (route) => answers[0](route));
    await page.clock.install();
    const told = () => page.evaluate(() => {
      const { textContent, className } = document.querySelector("#told");
      const of = (panel, name) => document.querySelector(`[aria-label="${panel}"] [aria-label="${name}"] .fine`)?.textContent;
      return { told: textContent, className, panels: document.querySelectorAll(".panel").length, rate: of("Now", "tokens"), level: of("Now", "answers"), colours: getComputedStyle(document.querySelector("#panels")).filter };
    });
    const seen = [];
    await page.goto(`${url}dashboard`);
    for (const before of ["It is being read", "perhaps a proxy", "Paceline "]) {
      await page.waitForFunction((text) => !document.querySelector("#told").textContent.includes(text), before);
      seen.push(await told());
      if (answers.length > 1) answers.shift();
      await page.clock.fastForward(2000); // it reads again
    }
    const order = await page.evaluate(async () => {
      const { Samples } = await import("/page/metrics.js");
      return new Samples(["x10", "x2", "x1"].map((name) => `a{b="${name}"} 1`).join("\n")).values("a", "b");
    });
    return { seen, order };
  },
};

/** The timeline of each of these reports: its facts and its tables. */
async function timelines(page, url, reports) {
  await page.setViewportSize({ width: 1200, height: 800 });
  await page.goto(`${url}docs`);
  return page.evaluate(async (reports) => {
    const { timeline } = await import("/page/timeline.js");
    const sheet = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "/page/charts.css" });
    document.head.append(sheet);
    await new Promise((loaded) => (sheet.onload = loaded));
    const figures = reports.map(timeline);
    document.querySelector("main").append(...figures);
    for (const each of document.querySelectorAll("details")) each.open = true;
    const texts = (nodes) => [...nodes].map(({ textContent }) => textContent);
    return figures.map((figure) => ({
      facts: Object.fromEntries([...figure.querySelectorAll(".facts > div")].map((pair) => texts(pair.children))),
      bytes: [...figure.querySelectorAll(":scope > div table tbody tr")].map((row) => texts(row.cells)),
      all: [...figure.querySelectorAll("details tbody tr")].map((row) => texts(row.cells)),
      pictures: [...figure.querySelectorAll("svg")].map((each) => each.ariaLabel),
    }));
  }, reports);
}
