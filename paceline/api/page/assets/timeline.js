// How an answer was written: what each side did when, what went over the link, and what it cost. From the report alone.

import { fact, make, short, svg, table, wide } from "./elements.js";
import { t } from "./text.js";

const WIDTH = 720;
const LEFT = 118; // of the names of the rows
const BINS = 100;
const ROW = 34;
const SIDES = ["device", "cloud"];
const MARKS = ["lost", "refused", "passed_over", "back"];

/** A figure of the report's `timeline`; without one its other facts. */
export function timeline(report) {
  const moments = momentsOf(report);
  const figure = make("figure", { className: "timeline" }, facts(report, moments));
  if (moments.length) {
    const legend = make("p", { className: "fine", textContent: t("timelineLegend") });
    figure.append(picture(moments), legend, costs(moments), bytes(moments), unfold(t("asTable"), all(moments)));
  }
  return figure;
}

function momentsOf(report) {
  const found = Array.isArray(report?.timeline) ? report.timeline : [];
  return found.filter((each) => SIDES.includes(each.side) && each.ms >= 0 && each.number >= 0).map((each) => ({ of: "", took_ms: 0, ...each }));
}

/** Tokens a second after the first ones, as the report's `timeline` has them; 0 where it does not say. */
export function pace(report) {
  const times = momentsOf(report).filter(({ kind }) => kind === "tokens").map(({ ms }) => ms);
  const last = Math.max(...times);
  return last > times[0] ? Math.max(0, (1000 * (sum(momentsOf(report), "tokens") - 1)) / (last - times[0])) : 0;
}

/** The sum of the numbers of a kind, of a side if one is named. */
export function sum(moments, kind, side, what = "number") {
  const of = moments.filter((each) => each.kind === kind && (!side || each.side === side));
  return of.reduce((total, each) => total + Number(each[what]), 0);
}

const end = (moment) => moment.ms + moment.took_ms;
const did = (kind) => t(`did_${kind}`);

function facts(report, moments) {
  const list = make("dl", { className: "facts" });
  const add = (name, value) => list.append(fact(name, value));
  const first = moments.find(({ kind }) => kind === "tokens");
  if (first) add(t("firstToken"), `${short(first.ms)} ms`);
  const rate = pace(report);
  if (rate) add(t("tokensASecond"), short(rate));
  const drafted = sum(moments, "drafted");
  if (drafted) {
    const accepted = sum(moments, "accepted");
    add(t("draftsAccepted"), t("ofDrafted", { accepted, drafted, share: Math.round((100 * accepted) / drafted) }));
    add(t("rolledBack"), drafted - accepted);
  }
  const trips = sum(moments, "round_trips");
  if (trips) add(t("roundTrips"), t("eachTook", { trips, time: short(sum(moments, "round_trips", "", "took_ms") / trips) }));
  if (trips || sum(moments, "sent")) add(t("bytesBoth"), `${short(sum(moments, "sent"))}, ${short(sum(moments, "received"))}`);
  for (const [side, use] of Object.entries(report?.energy ?? {})) add(t("energyOf", { side: t(side) }), `${short(use.joules)} J (${use.meter})`);
  return list;
}

/** Rows of both sides with the link between them; tokens, drafts and bytes as bars over time. */
function picture(moments) {
  const until = Math.max(1, ...moments.map(end));
  const x = (ms) => LEFT + ((WIDTH - LEFT - 8) * ms) / until;
  const parts = [];
  let y = 16;
  const row = (name, side, draw) => {
    parts.push(svg("text", { x: LEFT - 8, y: y + ROW - 8, class: `name ${side}` }, name));
    parts.push(svg("line", { x1: LEFT, x2: WIDTH - 8, y1: y + ROW - 4, y2: y + ROW - 4, class: "axis" }), ...draw(y + 4, ROW - 8));
    y += ROW;
  };
  const bars = (kind, side, style, highest) => (top, height) => {
    const bins = binned(moments.filter((each) => each.kind === kind && each.side === side), until);
    return bins.flatMap((value, at) => (value ? [bar(x, until, at, top, height, value / highest, style, `${short(value)} ${did(kind)}`)] : []));
  };
  const most = (kind) => Math.max(1, ...SIDES.flatMap((side) => binned(moments.filter((each) => each.kind === kind && each.side === side), until)));
  const work = (side) => (top, height) =>
    moments.filter((each) => each.side === side && ["search", "prefill"].includes(each.kind)).map((each) => {
      const width = Math.max(2, x(end(each)) - x(each.ms));
      const high = each.kind === "search" ? 0 : height / 2;
      return svg("rect", { x: x(each.ms), y: top + high, width, height: height / 2 - 1, class: `span ${each.kind} ${side}` }, svg("title", {}, `${short(each.took_ms)} ms: ${short(each.number)} ${did(each.kind)}`));
    });
  const has = (side, ...kinds) => moments.some((each) => each.side === side && kinds.includes(each.kind));
  const rows = (side) => {
    if (has(side, "search", "prefill")) row(t("reads", { side: t(side) }), side, work(side));
    if (has(side, "drafted")) row(t("drafts", { side: t(side) }), side, (top, height) => [...bars("drafted", side, "rejected", most("drafted"))(top, height), ...bars("accepted", side, side, most("drafted"))(top, height)]);
    if (has(side, "tokens")) row(t("writes", { side: t(side) }), side, bars("tokens", side, side, most("tokens")));
  };
  rows("device");
  if (moments.some((each) => each.kind === "sent")) row(t("link"), "link", (top, height) => link(moments, x, until, top, height));
  rows("cloud");
  for (const each of moments.filter(({ kind }) => MARKS.includes(kind))) {
    parts.push(svg("line", { x1: x(each.ms), x2: x(each.ms), y1: 12, y2: y, class: "mark" }), svg("text", { x: Math.min(x(each.ms) + 3, WIDTH - 90), y: 12, class: "mark" }, `${t(each.side)} ${did(each.kind)}`));
  }
  for (const at of [0, 0.25, 0.5, 0.75, 1]) {
    const anchor = at === 1 ? "end" : at ? "middle" : "start";
    parts.push(svg("text", { x: x(at * until), y: y + 14, class: "tick", "text-anchor": anchor }, at === 1 ? `${short(Math.round(until))} ms` : short(Math.round(at * until))));
  }
  const sides = SIDES.map((side) => `${t(side)} ${sum(moments, "tokens", side)} ${did("tokens")}, ${sum(moments, "drafted", side)} ${did("drafted")}`);
  const label = `${short(Math.round(until))} ms: ${sides.join("; ")}; ${sum(moments, "round_trips")} ${t("roundTrips")}.`;
  return wide(t("written"), svg("svg", { viewBox: `0 0 ${WIDTH} ${y + 20}`, role: "img", "aria-label": label }, ...parts));
}

function binned(moments, until) {
  const bins = new Array(BINS).fill(0);
  for (const each of moments) bins[Math.min(BINS - 1, Math.floor((BINS * each.ms) / until))] += each.number;
  return bins;
}

function bar(x, until, at, top, height, share, style, title) {
  const [from, to] = [x((at * until) / BINS), x(((at + 1) * until) / BINS)];
  const high = Math.max(2, height * share);
  return svg("rect", { x: from, y: top + height - high, width: to - from - 0.8, height: high, class: style }, svg("title", {}, title));
}

/** Bytes sent above the middle, received below it, before the round trips. */
function link(moments, x, until, top, height) {
  const trips = moments.filter(({ kind }) => kind === "round_trips").map((each) => svg("rect", {
    x: x(each.ms), y: top, width: Math.max(1, x(each.ms + each.took_ms / (each.number || 1)) - x(each.ms) - 0.8), height, class: "trip",
  }, svg("title", {}, `${t("roundTrips")}: ${short(each.took_ms / (each.number || 1))} ms`)));
  const colour = { sent: moments.find(({ kind }) => kind === "sent").side, received: moments.find(({ kind }) => kind === "received")?.side };
  const ways = { sent: binned(moments.filter(({ kind }) => kind === "sent"), until), received: binned(moments.filter(({ kind }) => kind === "received"), until) };
  const most = Math.max(...ways.sent, ...ways.received);
  const half = height / 2;
  const from = (at) => x((at * until) / BINS);
  return [...trips, ...Object.entries(ways).flatMap(([way, bins]) => bins.flatMap((value, at) => {
    if (!value) return [];
    const high = Math.max(1.5, half * (value / most));
    const y = way === "sent" ? top + half - high : top + half;
    return [svg("rect", { x: from(at), y, width: from(at + 1) - from(at) - 0.8, height: high, class: colour[way] }, svg("title", {}, `${short(value)} ${did(way)}`))];
  }))];
}

/** Whose turn it was, where that changed, and what `auto` compared. */
function costs(moments) {
  const part = make("div", { className: "costs" });
  const chosen = moments.filter(({ kind }) => kind === "strategy").map(({ of }) => of);
  if (chosen.length > 1) part.append(make("p", { textContent: chosen.join(` ${t("then")} `) }));
  const compared = moments.filter(({ kind }) => kind === "cost_ms");
  if (compared.length) {
    const most = Math.max(1e-9, ...compared.map(({ number }) => number));
    const rows = compared.flatMap(({ of, number }, at) => [
      svg("text", { x: LEFT - 8, y: 14 + 20 * at, class: "name" }, of),
      svg("rect", { x: LEFT, y: 4 + 20 * at, width: Math.max(2, ((WIDTH - LEFT - 150) * number) / most), height: 12, class: chosen.includes(of) ? "chosen" : "other" }),
      svg("text", { x: LEFT + Math.max(2, ((WIDTH - LEFT - 150) * number) / most) + 6, y: 14 + 20 * at, class: "tick" }, number ? t("msAToken", { time: short(number) }) : t("toMeasure")),
    ]);
    const label = compared.map(({ of, number }) => `${of} ${t("msAToken", { time: short(number) })}`).join(", ");
    part.append(svg("svg", { viewBox: `0 0 ${WIDTH} ${20 * compared.length + 4}`, role: "img", "aria-label": label }, ...rows));
  }
  return part;
}

function bytes(moments) {
  const kinds = [...new Set(moments.filter(({ kind }) => kind === "sent" || kind === "received").map(({ of }) => of))].sort();
  if (!kinds.length) return "";
  const of = (way, name) => sum(moments.filter((each) => each.of === name), way);
  const rows = kinds.map((name) => [name, of("sent", name), of("received", name)]);
  return make("div", {}, table(t("bytesByKind"), [t("message"), t("sent"), t("received")], rows));
}

function all(moments) {
  const found = new Map();
  for (const each of moments) {
    const key = [each.kind, each.side, each.of].join("\n");
    const known = found.get(key) ?? { ...each, number: 0, took_ms: 0, last: 0 };
    known.number += each.number;
    known.took_ms += each.took_ms;
    known.last = Math.max(known.last, end(each));
    found.set(key, known);
  }
  const rows = [...found.values()].map((each) => [
    did(each.kind), t(each.side), each.of, short(each.number), short(each.ms), short(Math.round(each.last)), each.took_ms ? short(each.took_ms) : "",
  ]);
  return table(t("happened"), [t("what"), t("side"), t("of"), t("number"), t("fromMs"), t("toMs"), t("tookMs")], rows);
}

function unfold(title, content) {
  return make("details", {}, make("summary", { textContent: title }), wide(title, content));
}
