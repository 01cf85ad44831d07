// Elements of HTML and SVG, and the small pictures that the timeline and the dashboard share.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, or attributes where it has no such property; children are elements or text. */
export function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** An element with attributes; children are elements or text. */
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** One of the icons of index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

/** A button that shows an icon and says what it does. */
export function iconButton(name, label, onclick) {
  return make("button", { type: "button", className: "quiet", ariaLabel: label, title: label, onclick }, icon(name));
}

/** A name and what it is, of a list of facts. */
export function fact(name, value) {
  return make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }));
}

/** What scrolls by itself where the page is narrow. */
export function wide(name, ...content) {
  return make("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: name }, ...content);
}

/** A name without the characters by which it would be read backwards, and what stands after it. */
export function legible(name) {
  return String(name).replace(/[\u202a-\u202e\u2066-\u2069]/g, " ");
}

/** A number as people read it, in the page's language: three digits, and k or M for what is large. */
export function short(number) {
  const size = Math.abs(number);
  const [scale, unit] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  const scaled = number / scale;
  const digits = Number.isInteger(scaled) ? {} : { maximumSignificantDigits: 3 };
  return `${scaled.toLocaleString(document.documentElement.lang, { useGrouping: false, ...digits })}${unit}`;
}

/** A table with a caption. rows: texts; the first of each is its heading. */
export function table(caption, head, rows) {
  const made = make("table");
  made.createCaption().textContent = caption;
  const top = made.createTHead().insertRow();
  for (const text of head) top.append(make("th", { textContent: text, scope: "col" }));
  const body = made.createTBody();
  for (const [first, ...rest] of rows) {
    const row = body.insertRow();
    row.append(make("th", { textContent: first, scope: "row" }), ...rest.map((text) => make("td", { textContent: text })));
    for (const each of row.cells) each.classList.toggle("prose", /^[^\d–]*$/.test(each.textContent));
  }
  for (const [at, each] of [...top.cells].entries()) { // stands as what is below it
    each.classList.toggle("prose", !at || [...body.rows].every(({ cells }) => cells[at].classList.contains("prose")));
  }
  return made;
}

/** The course of some values, the newest at the right. */
export function sparkline(values, name) {
  const [width, high] = [300, 36];
  const most = Math.max(...values, 0) || 1;
  const points = values.map((value, at) => `${((width * at) / Math.max(1, values.length - 1)).toFixed(1)},${(high - 1 - ((high - 2) * value) / most).toFixed(1)}`);
  const label = values.length ? `${name}: now ${short(values.at(-1))}, at most ${short(most)}` : `${name}: not known yet`;
  const parts = points.length > 1 ? [svg("polygon", { points: `0,${high} ${points.join(" ")} ${width},${high}` }), svg("polyline", { points: points.join(" ") })] : [];
  return svg("svg", { viewBox: `0 0 ${width} ${high}`, preserveAspectRatio: "none", class: "spark", role: "img", "aria-label": label }, ...parts);
}
