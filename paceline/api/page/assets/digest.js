// SHA-256 (FIPS 180-4). Over plain http from another machine `crypto.subtle` is missing.

const PRIMES = [];
for (let number = 2; PRIMES.length < 64; number += 1) if (PRIMES.every((prime) => number % prime)) PRIMES.push(number);
const fractions = (root) => PRIMES.map((prime) => ((prime ** (1 / root)) % 1) * 2 ** 32 | 0); // their first 32 bits
const START = fractions(2).slice(0, 8);
const KEYS = fractions(3);
const turned = (word, by) => (word >>> by) | (word << (32 - by));

/** The digest of a text in UTF-8, in hexadecimal. */
export function sha256(text) {
  const bytes = new TextEncoder().encode(text);
  const padded = new DataView(new ArrayBuffer(((bytes.length + 72) >> 6) << 6));
  bytes.forEach((byte, at) => padded.setUint8(at, byte));
  padded.setUint8(bytes.length, 0x80);
  padded.setUint32(padded.byteLength - 4, 8 * bytes.length);
  let state = START;
  const words = new Int32Array(64);
  for (let block = 0; block < padded.byteLength; block += 64) {
    let [a, b, c, d, e, f, g, h] = state;
    for (let at = 0; at < 64; at += 1) {
      const [early, late] = [words[at - 15], words[at - 2]];
      words[at] = at < 16 ? padded.getInt32(block + 4 * at) : words[at - 16] + (turned(early, 7) ^ turned(early, 18) ^ (early >>> 3))
        + words[at - 7] + (turned(late, 17) ^ turned(late, 19) ^ (late >>> 10));
      const one = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + KEYS[at] + words[at];
      const two = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    state = [a, b, c, d, e, f, g, h].map((word, at) => (word + state[at]) | 0);
  }
  return state.map((word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}
