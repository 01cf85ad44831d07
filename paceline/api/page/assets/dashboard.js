// The page /dashboard: what this side does, from /metrics alone.

import { requestText } from "./api.js";
import { fact, make, short, sparkline, svg, table, wide } from "./elements.js";
import { KeyDialog } from "./key.js";
import { save } from "./list.js";
import { History, Samples } from "./metrics.js";

const EVERY_MS = 2000;
const KEPT = 150; // samples: five minutes
const PLAIN = "autoregressive"; // the strategy that the others' speed is measured by
const KINDS = {
  open: "questions with their conversation, or searches", drafts: "guesses of next tokens", targets: "tokens of answers",
  found: "what was found: from a device its scores alone", weight: "how much its documents weigh", wanted: "requests for more of a guess",
  text: "texts written for the other side", close: "ends", handover: "who decides next", pace: "speed of this side", have: "what has arrived",
  about: "that tokens are approximate",
};
const $ = (id) => document.getElementById(id);
const history = new History(KEPT);
const key = new KeyDialog($("key"), read);
let paused = false;

// ---- panels ---------------------------------------------------------------------------------------------------------
/** One subject: figures, pictures and tables that are drawn anew where they are. */
class Panel {
  constructor(title) {
    this.node = make("section", { className: "panel", ariaLabel: title }, make("h2", { textContent: title }));
    this.parts = new Map();
    $("panels").append(this.node);
  }

  /** The part of this name, which is made at first. */
  part(name, made) {
    if (!this.parts.has(name)) {
      this.parts.set(name, made());
      this.node.append(this.parts.get(name));
    }
    return this.parts.get(name);
  }

  /** A figure. value: the number itself, as /metrics has it or as it follows from it; shown: how it is written. */
  figure(name, value, shown = short(value)) {
    const list = this.part("figures", () => make("dl", { className: "facts" }));
    const pair = this.part(`figure ${name}`, () => fact(name, ""));
    if (pair.parentNode !== list) list.append(pair);
    pair.dataset.figure = name;
    pair.dataset.value = value;
    pair.lastChild.textContent = shown;
  }

  draw(name, ...content) {
    this.part(name, () => wide(name)).replaceChildren(...content);
  }

  line(name, values, unit) {
    const now = values.length ? `${short(values.at(-1))} ${unit}` : "not known yet";
    this.draw(name, make("p", { className: "fine", textContent: `${name}: ${now}` }), sparkline(values, `${name}, ${unit}`));
  }
}

const panels = {};
const panel = (title) => (panels[title] ??= new Panel(title));
const ms = (seconds) => `${short(1000 * seconds)} ms`;
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

function now(all) {
  const at = panel("Now");
  at.figure("answers under way", all.sum("paceline_answers"));
  at.figure("requests", all.sum("paceline_requests"));
  at.figure("wait for memory", all.sum("paceline_waiting_answers"));
  at.figure("links", all.sum("paceline_links"));
  at.figure("documents", all.sum("paceline_documents"));
  at.line("tokens", history.rates("paceline_tokens_total"), "a second");
  at.line("answers", history.levels("paceline_answers"), "under way");
}

function speed(all) {
  const at = panel("Speed");
  const mean = (name) => all.sum(`${name}_sum`) / all.sum(`${name}_count`);
  for (const [title, name] of [["first text after", "paceline_first_text_seconds"], ["from token to token", "paceline_token_gap_seconds"], ["whole answer", "paceline_answer_seconds"]]) {
    if (all.sum(`${name}_count`)) at.figure(title, mean(name), ms(mean(name)));
  }
  at.figure("answers", all.sum("paceline_finished_answers_total"));
  at.figure("tokens", all.sum("paceline_tokens_total"));
  const lanes = ["cloud", "device", "none"].map((lane) => [lane, all.sum("paceline_tokens_total", { lane })]);
  at.draw("Whose documents decided the tokens", shares(lanes));
}

/** Parts of a whole as one bar, with their numbers. */
function shares(parts) {
  const whole = parts.reduce((total, [, number]) => total + number, 0);
  const told = parts.map(([name, number]) => `${name === "none" ? "neither" : name} ${short(number)} (${percent(number, whole)})`).join(" · ");
  let x = 0;
  const bars = parts.map(([name, number]) => {
    const width = whole ? (300 * number) / whole : 0;
    const bar = svg("rect", { x, y: 0, width, height: 10, class: name });
    x += width;
    return bar;
  });
  const text = make("p", { className: "fine", textContent: told });
  return make("div", {}, svg("svg", { viewBox: "0 0 300 10", preserveAspectRatio: "none", class: "parts", role: "img", "aria-label": told }, ...bars), text);
}

function strategies(all) {
  const names = all.values("paceline_finished_answers_total", "strategy").filter(Boolean);
  if (!names.length) return;
  const speeds = Object.fromEntries(names.map((strategy) => {
    const seconds = all.sum("paceline_writing_seconds_total", { strategy });
    return [strategy, seconds ? all.sum("paceline_written_tokens_total", { strategy }) / seconds : 0];
  }));
  const rows = names.map((strategy) => {
    const drafted = all.sum("paceline_drafted_tokens_total", { strategy });
    const ratio = speeds[strategy] && speeds[PLAIN] ? `${(speeds[strategy] / speeds[PLAIN]).toFixed(2)}×` : "–";
    return [strategy, short(all.sum("paceline_finished_answers_total", { strategy })), short(all.sum("paceline_chosen_answers_total", { strategy })), short(all.sum("paceline_tokens_total", { strategy })),
      drafted ? `${percent(all.sum("paceline_accepted_tokens_total", { strategy }), drafted)} of ${short(drafted)}` : "–", speeds[strategy] ? short(speeds[strategy]) : "–", ratio];
  });
  panel("Strategies").draw("Strategies, as a table", table("What answers were written by", ["strategy", "answers", "by auto", "tokens", "accepted", "tokens a s", "of plain"], rows));
}

function handoff(all) {
  const [own, theirs] = ["device", "cloud"].map((decided) => all.sum("paceline_handoffs_total", { decided }));
  if (!(own + theirs)) return;
  const at = panel("Answers that this device began");
  at.figure("begun here", own + theirs);
  at.figure("ended here", own, `${short(own)} (${percent(own, own + theirs)})`);
  at.figure("cloud tokens saved", all.sum("paceline_saved_cloud_tokens_total"));
  const worse = all.sum("paceline_handoff_risk_total");
  at.figure("expected to be worse than the cloud's own", worse, `${short(worse)} (${percent(worse, own + theirs)})`);
}

function links(all) {
  const at = panel("Links");
  if (all.has("paceline_link_rtt_seconds")) at.figure("longest round trip", all.sum("paceline_link_rtt_seconds"), ms(all.sum("paceline_link_rtt_seconds")));
  at.figure("bytes sent", all.sum("paceline_link_sent_bytes_total"));
  at.figure("bytes received", all.sum("paceline_link_received_bytes_total"));
  at.line("sent", history.rates("paceline_link_sent_bytes_total"), "bytes a second");
  at.line("received", history.rates("paceline_link_received_bytes_total"), "bytes a second");
  const rows = all.values("paceline_peer_protocol", "peer").map((peer) => {
    const known = (name, show) => (all.all(name, { peer }).length ? show(all.sum(name, { peer })) : "–");
    return [peer, known("paceline_peer_rtt_seconds", ms), known("paceline_peer_bandwidth_bytes", (rate) => `${short(rate)} B/s`), short(all.sum("paceline_peer_protocol", { peer })),
      ...["asked", "asks", "sent_bytes", "received_bytes"].map((name) => short(all.sum(`paceline_peer_${name}`, { peer })))];
  });
  if (rows.length) at.draw("Who is linked", table("Who is linked, since the link is up", ["peer", "round trip", "rate limit", "protocol", "asked", "asks us", "sent", "received"], rows));
}

function engine(all) {
  const at = panel("Engine");
  const [steps, rows] = [all.sum("paceline_engine_steps_total"), all.sum("paceline_engine_rows_total")];
  at.figure("forward passes", steps);
  at.figure("rows", rows);
  at.figure("rows a pass", steps ? rows / steps : 0);
  const [prompt, cached] = [all.sum("paceline_prompt_tokens_total"), all.sum("paceline_cached_prompt_tokens_total")];
  at.figure("prompt tokens from the cache", cached, `${short(cached)} of ${short(prompt)} (${percent(cached, prompt)})`);
  at.figure("preempted", all.sum("paceline_engine_preemptions_total"));
  if (all.has("paceline_kv_rows")) {
    const [whole, free] = [all.sum("paceline_kv_rows"), all.sum("paceline_kv_free_rows")];
    at.figure("KV rows in use", whole - free, `${short(whole - free)} of ${short(whole)} (${percent(whole - free, whole)})`);
  }
  at.line("rows", history.rates("paceline_engine_rows_total"), "a second");
}

function energy(all) {
  const [computing, sending] = ["computing", "sending"].map((of) => all.sum("paceline_joules_total", { of }));
  if (!all.has("paceline_joules_total")) return;
  const at = panel("Energy of answers");
  const tokens = all.sum("paceline_tokens_total");
  at.figure("J computing", computing);
  at.figure("J sending", sending);
  if (tokens) at.figure("J a token", (computing + sending) / tokens);
  at.line("power", history.rates("paceline_joules_total"), "W");
}

function ends(all) {
  const at = panel("Ends and errors");
  for (const outcome of ["stop", "length", "left", "failed"]) at.figure(outcome, all.sum("paceline_finished_answers_total", { outcome }));
  const rows = [
    ...all.all("paceline_degraded_answers_total").map(({ labels, value }) => [labels.why.replaceAll("_", " "), short(value)]),
    ...all.all("paceline_refused_requests_total").map(({ labels, value }) => [`refused with ${labels.status}`, short(value)]),
  ];
  at.draw("Errors, as a table", rows.length ? table("What went without, or not at all", ["what", "times"], rows) : document.createTextNode("Nothing was refused, and no answer had to do with less."));
}

// ---- what left this side today --------------------------------------------------------------------------------------
function left(all) {
  const side = all.values("paceline_info", "side")[0] ?? "side";
  const at = panel(`What left this ${side === "cloud" ? "server" : "device"} today`);
  const sent = all.all("paceline_sent_today_bytes");
  const web = all.all("paceline_web_sent_bytes_total");
  const total = sent.reduce((sum, { value }) => sum + value, 0);
  at.figure("bytes to the other side", total);
  at.figure("bytes to the web, since the start", web.reduce((sum, { value }) => sum + value, 0));
  at.draw("By hour of the day", hours(sent));
  const kinds = all.values("paceline_sent_today_bytes", "kind");
  const rows = kinds.map((kind) => [kind, KINDS[kind] ?? "", short(all.sum("paceline_sent_today_bytes", { kind }))]);
  at.draw("By kind of message", rows.length ? table("Messages to the other side", ["kind", "what", "bytes"], rows) : document.createTextNode("Nothing yet."));
  at.part("save", () => make("button", { type: "button", textContent: "Save as CSV", onclick: saveSent }));
}

function hours(sent) {
  const bins = new Array(24).fill(0);
  for (const { labels, value } of sent) bins[Number(labels.hour)] += value;
  const most = Math.max(1, ...bins);
  const bars = bins.map((value, hour) => svg("rect", { x: 10 * hour + 1, y: 60 - (50 * value) / most, width: 8, height: (50 * value) / most, class: "hour" }, svg("title", {}, `${hour} h: ${value} bytes`)));
  const names = [0, 6, 12, 18].map((hour) => svg("text", { x: 10 * hour, y: 71, class: "tick" }, `${hour} h`));
  const told = bins.map((value, hour) => (value ? `${hour} h ${short(value)} bytes` : "")).filter(Boolean).join(", ");
  return svg("svg", { viewBox: "0 0 240 74", role: "img", "aria-label": `By hour: ${told || "nothing"}` }, svg("line", { x1: 0, x2: 240, y1: 60, y2: 60, class: "axis" }), ...bars, ...names);
}

/** The table of `What left this side today`, as RFC 4180 has it. */
function csv(all) {
  const lines = all.all("paceline_sent_today_bytes").map(({ labels, value }) => [labels.hour, labels.kind, value]);
  return [["hour", "kind", "bytes"], ...lines].map((line) => `${line.join(",")}\r\n`).join("");
}

function saveSent() {
  const day = new Date().toLocaleDateString("sv"); // YYYY-MM-DD
  save(`paceline-sent-${day}.csv`, csv(history.last), "text/csv");
}

// ---- reading --------------------------------------------------------------------------------------------------------
async function read() {
  try {
    history.add(new Samples(await requestText("metrics")));
  } catch (error) {
    const old = history.last ? ` What is shown is of ${new Date(history.last.at).toLocaleTimeString()}.` : "";
    $("told").textContent = error.message + old;
    $("told").className = "error";
    if (error.status === 401) key.open();
    return;
  }
  const all = history.last;
  const { side = "", version = "" } = all.all("paceline_info")[0]?.labels ?? {};
  document.title = `Dashboard of the ${side} – Paceline`;
  $("title").textContent = `Dashboard of the ${side}`;
  $("told").textContent = `Paceline ${version}`;
  $("told").className = "";
  for (const show of [now, speed, left, links, strategies, handoff, engine, energy, ends]) show(all);
}

$("pause").onclick = () => {
  paused = !paused;
  $("pause").ariaPressed = String(paused);
};
await read();
setInterval(() => !paused && !document.hidden && !$("key").open && read(), EVERY_MS);
