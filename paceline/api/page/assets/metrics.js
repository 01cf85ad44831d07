// Numbers of `/metrics`: the text format of Prometheus, read, and kept for as long as the dashboard shows them.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const IN_ORDER = new Intl.Collator("en", { numeric: true }).compare;
const ESCAPED = { n: "\n", "\\": "\\", '"': '"' };

/** The samples of one answer of `/metrics`. */
export class Samples {
  constructor(text, at = Date.now()) {
    this.at = at;
    this.found = new Map();
    for (const line of text.split("\n")) {
      const [, name, labels, value] = LINE.exec(line) ?? [];
      if (!name) continue; // a comment
      const sample = { labels: Object.fromEntries([...(labels ?? "").matchAll(LABEL)].map(([, key, raw]) => [key, unescaped(raw)])), value: Number(value) };
      if (this.found.has(name)) this.found.get(name).push(sample);
      else this.found.set(name, [sample]);
    }
  }

  /** Samples of this name with these labels. */
  all(name, labels = {}) {
    return (this.found.get(name) ?? []).filter((each) => Object.entries(labels).every(([key, value]) => each.labels[key] === value));
  }

  has(name) {
    return this.found.has(name);
  }

  /** Their sum. */
  sum(name, labels) {
    return this.all(name, labels).reduce((total, { value }) => total + value, 0);
  }

  /** Values of a label, in order: device 2 before device 10. */
  values(name, label) {
    return [...new Set(this.all(name).map(({ labels }) => labels[label]))].sort(IN_ORDER);
  }
}

function unescaped(text) {
  return text.replace(/\\(.)/g, (_, character) => ESCAPED[character] ?? character);
}

/** The newest samples, and what they say a second. */
export class History {
  constructor(length) {
    this.length = length;
    this.taken = [];
  }

  /** A program that began anew counts from 0: what was before is dropped. */
  add(samples) {
    const counted = "paceline_engine_steps_total";
    if (this.taken.length && samples.sum(counted) < this.last.sum(counted)) this.taken = [];
    this.taken.push(samples);
    if (this.taken.length > this.length) this.taken.shift();
  }

  get last() {
    return this.taken.at(-1);
  }

  /** A counter's growth a second between each two samples. */
  rates(name, labels) {
    return this.taken.slice(1).map((samples, before) => {
      const earlier = this.taken[before];
      return Math.max(0, (samples.sum(name, labels) - earlier.sum(name, labels)) / Math.max(0.001, (samples.at - earlier.at) / 1000));
    });
  }

  levels(name) {
    return this.taken.map((samples) => samples.sum(name));
  }
}
