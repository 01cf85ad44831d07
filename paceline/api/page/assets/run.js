// Text of which each character knows the side that decided it.

export const LANES = { cloud: "c", device: "d" };
export const SIDES = { c: "cloud", d: "device" };
export const NONE = ".";

/** A text and, at the same indices, its lanes: `c` cloud, `d` device, `.` neither. Immutable. */
export class Run {
  constructor(text, lanes = NONE.repeat(text.length)) {
    this.text = text;
    this.lanes = lanes;
  }

  get length() {
    return this.text.length;
  }

  slice(start, end) {
    return new Run(this.text.slice(start, end), this.lanes.slice(start, end));
  }

  startsWith(other) {
    return this.text.startsWith(other.text) && this.lanes.startsWith(other.lanes);
  }

  trim() {
    const start = this.text.length - this.text.trimStart().length;
    return this.slice(start, Math.max(start, this.text.trimEnd().length));
  }

  /** The lines, without their ends. */
  lines() {
    const found = [];
    let start = 0;
    for (let end = this.text.indexOf("\n"); end !== -1; end = this.text.indexOf("\n", start)) {
      found.push(this.slice(start, end));
      start = end + 1;
    }
    found.push(this.slice(start));
    return found;
  }

  static join(runs, between = "\n") {
    return new Run(runs.map((run) => run.text).join(between), runs.map((run) => run.lanes).join(NONE.repeat(between.length)));
  }
}

/** Append a run as text nodes, each stretch of one lane in an element of its own, also with what stands before it. */
export function appendRun(parent, run) {
  for (let start = 0; start < run.length; ) {
    const lane = run.lanes[start];
    let end = start + 1;
    while (end < run.length && run.lanes[end] === lane) end += 1;
    const text = run.text.slice(start, end);
    const last = parent.lastChild;
    const name = `lane-${SIDES[lane]}`;
    const before = lane === NONE ? last : last?.className === name ? last.firstChild : null;
    if (before?.nodeType === Node.TEXT_NODE) {
      before.appendData(text);
    } else if (lane === NONE) {
      parent.append(text);
    } else {
      const span = document.createElement("span");
      span.className = name;
      span.append(text);
      parent.append(span);
    }
    start = end;
  }
}
