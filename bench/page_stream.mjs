// A long answer streaming into the web page in Chromium: `node bench/page_stream.mjs [ASSETS ..]`, folders of the page's files
// that are compared, run by run in turns. Prints for each folder and text the median of the runs. Needs `make clients tools`.
//
// longest: ms of the longest task; over50: tasks over 50 ms; frames: a second, by requestAnimationFrame; script, layout, style,
// tasks: ms in all, by Chromium's own counters; layouts: their number.

import { createReadStream } from "node:fs";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { begin, ended, launched, streamOf } from "../tests/e2e/clients/browser.mjs";

const HERE = new URL("../paceline/api/page/assets/", import.meta.url).pathname;
const RUNS = Number(process.env.RUNS ?? 5);
const LENGTH = 30_000; // characters of an answer
const PIECE = 12; // characters of an event
const EVERY_MS = 16; // this many events:
const EVENTS = 4;
const TYPES = { ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2", ".webmanifest": "application/manifest+json" };
const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; manifest-src 'self'; "
  + "connect-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'";

const CODE = Array.from({ length: 400 }, (_, at) => `    value_${at} = compute(left[${at}], "a text", right=${at} * 2)  # what is done\n`).join("");
const PROSE = "A **harbour** has _two_ sides, of which `one` is [deep](https://example.org/a), and the other one is where boats lie. ";
const TEXTS = {
  mixed: ["# One\n\n", `${PROSE.repeat(4)}\n\n`, `- ${PROSE}\n`.repeat(8), "\n|a|b|\n|-|-|\n", "|12|`x` and y|\n".repeat(30), "\nSo $a^2 + b^2 = c^2$, and:\n\n", "$$\n\\frac{1}{2}\n$$\n\n",
    `\`\`\`python\ndef f():\n${CODE.slice(0, 3000)}\n\`\`\`\n\n`].join("").repeat(6),
  code: `\`\`\`python\ndef f():\n${CODE.slice(0, 7900)}\n\`\`\`\n\n`.repeat(4),
  list: `- ${PROSE}\n`.repeat(300),
  table: `|a|b|c|\n|-|-|-|\n${"|some words|`code`|**more** words of it|\n".repeat(900)}`,
  paragraph: PROSE.repeat(300),
};

/** The page's files, and as much of the API as it asks for. */
function serving(assets, text) {
  const pieces = [];
  for (let at = 0; at < LENGTH; at += PIECE) pieces.push([text.slice(at, Math.min(at + PIECE, LENGTH)), ["cloud", "device", null][(at / PIECE) % 3]]);
  const events = streamOf(pieces, { paceline: { strategy: "aggregate" } }).split("\n\n").slice(0, -1);
  const list = { data: [], has_more: false, total: 0 };
  const objects = {
    "/readyz": { side: "cloud", linked: true, model: "m", documents: 0 }, "/v1/models": { data: [{ id: "m", paceline: { kind: "chat", side: "cloud", strategies: [] } }] },
  };
  return createServer((request, response) => {
    const { pathname } = new URL(request.url, "http://localhost");
    if (pathname === "/v1/responses") {
      response.writeHead(200, { "content-type": "text/event-stream" });
      const timer = setInterval(() => {
        response.write(events.splice(0, EVENTS).map((event) => `${event}\n\n`).join(""));
        if (events.length) return;
        clearInterval(timer);
        response.end();
      }, EVERY_MS);
    } else if (pathname === "/" || pathname.startsWith("/page/")) {
      response.writeHead(200, { "content-type": TYPES[extname(pathname)] ?? "text/html", "content-security-policy": POLICY });
      createReadStream(join(assets, pathname === "/" ? "index.html" : pathname.slice("/page/".length))).pipe(response);
    } else {
      response.writeHead(200, { "content-type": "application/json" });
      response.end(JSON.stringify(objects[pathname] ?? (request.method === "POST" ? { id: "one" } : list)));
    }
  });
}

async function measured(browser, assets, text) {
  const server = serving(assets, text);
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  const context = await browser.newContext({ viewport: { width: 1200, height: 800 } });
  try {
    const page = await context.newPage();
    await page.goto(`http://127.0.0.1:${server.address().port}/`);
    await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
    const chromium = await context.newCDPSession(page);
    await chromium.send("Performance.enable");
    const counters = async () => Object.fromEntries((await chromium.send("Performance.getMetrics")).metrics.map(({ name, value }) => [name, value]));
    await page.evaluate(() => {
      window.seen = { tasks: [], frames: 0, start: performance.now() };
      new PerformanceObserver((list) => window.seen.tasks.push(...list.getEntries().map(({ duration }) => duration))).observe({ type: "longtask" });
      const frame = () => {
        window.seen.frames += 1;
        requestAnimationFrame(frame);
      };
      frame();
    });
    const before = await counters();
    await begin(page, "Say much.");
    await ended(page);
    const after = await counters();
    const { tasks, frames, seconds, size } = await page.evaluate(() => ({ ...window.seen, seconds: (performance.now() - window.seen.start) / 1000, size: document.querySelector(".answer .words").textContent.length }));
    if (size < LENGTH / 2) throw new Error(`only ${size} characters were shown`);
    const ms = (name) => 1000 * (after[name] - before[name]);
    return {
      longest: Math.max(0, ...tasks), over50: tasks.length, frames: frames / seconds, script: ms("ScriptDuration"), layout: ms("LayoutDuration"),
      style: ms("RecalcStyleDuration"), tasks: ms("TaskDuration"), layouts: after.LayoutCount - before.LayoutCount,
    };
  } finally {
    await context.close();
    server.close();
  }
}

const median = (values) => values.sort((one, other) => one - other)[Math.floor(values.length / 2)];
const browser = await launched("/usr/bin/chromium");
const folders = process.argv.length > 2 ? process.argv.slice(2) : [HERE];
for (const [name, text] of Object.entries(TEXTS)) {
  const runs = folders.map(() => []);
  for (let run = 0; run < RUNS; run += 1) for (const [at, assets] of folders.entries()) runs[at].push(await measured(browser, assets, text));
  for (const [at, assets] of folders.entries()) {
    const figures = Object.keys(runs[at][0]).map((figure) => [figure, Math.round(10 * median(runs[at].map((each) => each[figure]))) / 10]);
    console.log(JSON.stringify({ text: name, assets, ...Object.fromEntries(figures) }));
  }
}
await browser.close();
