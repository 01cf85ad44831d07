"""An engine without a model, for tests, the simulator and `--model fake`: a seeded table model over bytes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import PlacedSegment, SeqId, common_length
from paceline.core.sampling.dist import GAMMA, Dist, mixed, mixed_number
from paceline.engine.base import NO_FIELDS, LoadedModel, ModelInfo
from paceline.engine.sequence_table import RowListEngine
from paceline.errors import EngineError

_WORDS = (
    "the of and to in a is that for it was on are as with at be this have from or one had by but not what all were we "
    "when your can said there use an each which she do how their if will up other about out many then them these so "
    "some her would make like him into time has look two more write go see number no way could people my than first "
    "water been call who its now find long down day did get come made may part over new sound take only little work "
    "know place year live me back give most very after thing our just name good sentence man think say great where "
    "help through much before line right too mean old any same tell boy follow came want show also around form three "
    "small set put end does another well large must big even such because turn here why ask went men read need land "
    "café über für grün naïve señor père déjà öl straße"
)
_SEPARATORS = (
    (" ", 14.0),
    (", ", 1.5),
    (". ", 1.5),
    (" \N{EN DASH} ", 0.2),
    ("… ", 0.2),
)  # separators between words, with their weights

_START = np.array(sorted({*b"abcdefghijklmnopqrstuvwxyz .,-'", 0xC3, 0xE2}), dtype=np.int64)
_SECOND = {
    0xC3: (0x9F, 0xA0, 0xA4, 0xA8, 0xA9, 0xAF, 0xB1, 0xB6, 0xBC),
    0xE2: (0x80,),
}  # continuation bytes of its accented letters, dash and ellipsis
_THIRD = {(0xE2, 0x80): (0x93, 0xA6)}  # the dash and the ellipsis
_NARROW = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}  # RFC 3629, section 4


def _support(recent: tuple[int, ...]) -> NDArray[np.int64]:
    """Bytes that may follow the last three tokens, ascending."""
    third, second, last = (-1, -1, *recent)[-3:] if len(recent) < 3 else recent[-3:]
    if last in _SECOND:
        return np.array(_SECOND[last], dtype=np.int64)
    if (second, last) in _THIRD:
        return np.array(_THIRD[second, last], dtype=np.int64)
    if 0xC2 <= last <= 0xF4:  # the lead byte of a character that only a prompt can hold
        low, high = _NARROW.get(last, (0x80, 0xBF))
        return np.arange(low, high + 1, dtype=np.int64)
    inside = 0x80 <= last <= 0xBF
    if inside and (0xE0 <= second <= 0xF4 or (0x80 <= second <= 0xBF and 0xF0 <= third <= 0xF4)):
        return np.arange(0x80, 0xC0, dtype=np.int64)
    return _START


class BigramModel:
    """Letter statistics of a word list: base distributions of one seed, which weights the words. Results are cached and
    must not be written to.

    Next-byte probabilities after the last two bytes, on a support that keeps the text valid UTF-8 (RFC 3629): inside a
    character only bytes that can continue it.
    """

    def __init__(self, seed: int) -> None:
        words = _WORDS.split()
        weights = np.random.Generator(np.random.PCG64(seed & (1 << 63) - 1)).gamma(1.0, 1.0, len(words)) + 0.1
        self._after_two: defaultdict[tuple[int, int], NDArray[np.float64]] = defaultdict(lambda: np.zeros(257))
        self._after_one: defaultdict[int, NDArray[np.float64]] = defaultdict(lambda: np.zeros(257))
        for word, weight in zip(words, weights, strict=True):
            for separator, frequency in _SEPARATORS:
                text = f" {word}{separator}".encode()
                for i in range(1, len(text)):
                    self._after_one[text[i - 1]][text[i]] += weight * frequency
                    if i > 1 and text[i - 1] != 0x20:  # after a space only the single-byte statistics count
                        self._after_two[text[i - 2], text[i - 1]][text[i]] += weight * frequency
        self.base = cache(self._computed)

    def may_end(self, recent: tuple[int, ...]) -> bool:
        """True between characters: an answer must not end inside one."""
        return self.base(recent)[0] is _START

    def _computed(self, recent: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(support, probabilities) of the next byte after the last tokens, newest last."""
        support, last = _support(recent), recent[-1]
        pair = self._after_two.get((recent[-2], last)) if len(recent) > 1 else None
        single = self._after_one.get(last)
        if single is None:  # a digit, a capital, the end of text: as at the start of a word
            single = self._after_one[0x20]
        probs = np.full(len(support), 0.02 / len(support))
        for share, counts in ((0.08, single), (0.90, single if pair is None else pair)):
            counted = counts[support]
            probs += share * (counted / counted.sum() if counted.sum() else 1.0 / len(support))
        return support, probs


_bigrams = lru_cache(maxsize=8)(BigramModel)  # counted once a process, not once an engine
EOS = 256
VOCAB = 257


def _text(content: object) -> str:
    """Text of a message's content: a string, None, or OpenAI's list of parts, of which only text parts count."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


class ByteTokenizer:
    """`TextModel` over UTF-8 bytes: one id per byte, and one for the end of text. Its chat format is plain text."""

    vocab_size = VOCAB
    eos_ids = frozenset({EOS})
    fingerprint = sha256(b"paceline bytes 1").hexdigest()
    one_document = True
    thinking: tuple[str, str] | None = None
    tools = "hermes"

    def encode(self, text: str, *, own: bool = False) -> list[int]:  # noqa: ARG002  # it has no names in texts
        return list(text.encode("utf-8", errors="replace"))

    def raw(self, text: str) -> list[int]:
        return self.encode(text) or [EOS]

    def token_name(self, token: int) -> str:
        return "<|end|>" if token == EOS else self.decode([token])

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < EOS).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < EOS else b""

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        template_kwargs: Mapping[str, object] = NO_FIELDS,  # noqa: ARG002  # its format has no variables
    ) -> list[int]:
        begun = ""
        if messages and messages[-1].get("role") == "assistant":
            *messages, last = messages
            begun = _text(last.get("content"))
        lines = "".join(f"{message.get('role', 'user')}: {_text(message.get('content'))}\n" for message in messages)
        return self.encode(f"{lines}assistant: {begun}")

    def document_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        document: str,
        *,
        template_kwargs: Mapping[str, object] = NO_FIELDS,  # noqa: ARG002
    ) -> tuple[list[int], list[int], list[int]]:
        return self.encode("document: "), self.encode(document + "\n"), self.chat(messages)


_MASK = (1 << 64) - 1
SPREAD = 0.15
FAKE_ROWS_PER_MIB = 256  # its rows are a few bytes; `--kv-mib` bounds them as if they were a small model's
_SENTENCE_ENDS = frozenset(b".!?")
_ANSWER_MARK = tuple(b"assistant: ")  # rows of an answer are counted from here; the model never writes a colon


def uniforms(key: int, count: int) -> NDArray[np.float64]:
    """(count,) uniform numbers in (0, 1), a function of `key` alone."""
    hashes = mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(key))
    bits: NDArray[np.float64] = (hashes >> np.uint64(11)).astype(np.float64)
    return (bits + 0.5) / 2.0**53


@dataclass(frozen=True, slots=True)
class FakeRow:
    """Stored state of one row, from which later rows are computed."""

    token: int
    position: int
    digest: int  # hash of all tokens up to this row
    recent: tuple[int, ...]  # the last tokens modulo `VOCAB`, newest last: enough for the base, the mark and `order`
    answer_rows: int  # rows since the end of the last mark, or since the beginning


MAX_CACHED = 64  # sequences that have ended


def _num_common(rows: Sequence[FakeRow], tokens: tuple[int, ...], known: int) -> int:
    """Length of the longest common prefix; `known` if it is no longer than that."""
    if len(rows) <= known or len(tokens) <= known or rows[known].token != tokens[known]:
        return known  # most cached sequences: a loop over each of them takes longer than the engine's step
    held = tuple(row.token for row in rows[: len(tokens)])
    return max(common_length(held, tokens), known)


class FakeEngine(RowListEngine[FakeRow]):
    """The engine contract on a seeded table model over bytes. Its text is noise with spaces.

    next = (1 - spread) * base(last two tokens) + spread * own(hash of the whole prefix), so the distributions after two
    prompts are similar, yet a wrong, missing or reordered row of KV changes every later distribution. It computes from
    its stored rows only, so it cannot use a row that was never written.

    order: number of last tokens that `own` depends on; None: the whole prefix.

    capacity_rows: bound on the rows of all sequences together, to test exhausted memory: a batch that does not fit is
    refused whole. The probability of the end grows with the answer, so that both greedy and sampled answers end,
    typically after 30 to 120 tokens.
    """

    def __init__(
        self,
        seed: int = 0,
        order: int | None = None,
        spread: float = SPREAD,
        max_positions: int = 4096,
        capacity_rows: int | None = None,
        vocab_size: int = VOCAB,
    ) -> None:
        """vocab_size: ids from `VOCAB` on are read modulo `VOCAB`, and their probability is zero."""
        if not 0.0 <= spread <= 1.0 or (order is not None and order < 1):
            raise EngineError(f"spread must be in 0..1 and order at least 1, got {spread} and {order}")
        if vocab_size < VOCAB:
            raise EngineError(f"the fake model knows {VOCAB} ids, not {vocab_size}")
        wider = "" if vocab_size == VOCAB else f" {vocab_size}"
        identity = sha256(f"paceline fake 1 {seed} {order} {spread}{wider}".encode()).hexdigest()
        super().__init__(ModelInfo("fake", identity, vocab_size, max_positions, "float64", "fake"))
        self._key = mixed_number(seed & _MASK ^ GAMMA)
        self._order, self._spread = order, spread
        self._num_recent = max(len(_ANSWER_MARK), order or 0)
        self._base_model = _bigrams(seed)
        self._capacity = capacity_rows
        self._ended: deque[tuple[str, list[FakeRow]]] = deque(maxlen=MAX_CACHED)  # salt and rows; beside the capacity

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._table.export(seq, len(tokens))
        rows = self._rows[seq][: len(tokens)]
        assert [row.token for row in rows] == list(tokens), "the caller passes other tokens than the rows hold"
        digests = np.array([row.digest for row in rows], dtype=np.uint64).view(np.int64)
        rest = np.array([(row.token, row.position, row.answer_rows) for row in rows], dtype=np.int64)
        return KvPrefix(
            self._info.fingerprint, "int64", tuple(tokens), digests[None, :, None, None], rest[None, :, None]
        )

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        shapes = (1, len(rows.tokens), 1, 1), (1, len(rows.tokens), 1, 3)
        if rows.model != self._info.fingerprint or (rows.keys.shape, rows.values.shape) != shapes:
            raise EngineError(f"these rows are of another model: {rows.keys.shape} and {rows.values.shape}")
        self._reserve(len(rows.tokens), "to adopt")
        self._table.adopt(seq, rows.tokens)
        digests = rows.keys.astype(np.int64).view(np.uint64).ravel().tolist()
        rest = rows.values.reshape(-1, 3).tolist()
        ids = [token % VOCAB for token, _, _ in rest]
        self._rows[seq] = [
            FakeRow(token, position, digests[i], tuple(ids[: i + 1][-self._num_recent :]), answer_rows)
            for i, (token, position, answer_rows) in enumerate(rest)
        ]

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        self._begin(seq, salt)
        running = [(other, self._committed(each)) for each, other in self._salts.items() if each in self._rows]
        longest: list[FakeRow] = []
        wanted = tuple(tokens[:-1])
        for other, rows in (*self._ended, *running):
            if other == salt and (common := _num_common(rows, wanted, len(longest))) > len(longest):
                longest = rows[:common]
        if imported := self._import_longer(seq, stored, len(longest), len(tokens)):
            return imported
        free = self.free_rows()
        if not longest or (free is not None and len(longest) > free):
            return 0
        self._table.adopt(seq, tokens[: len(longest)])
        self._rows[seq] = list(longest)
        return len(longest)

    def release(self, seq: SeqId) -> None:
        if seq in self._salts and seq in self._rows:
            self._ended.append((self._salts[seq], self._committed(seq)))
        super().release(seq)

    def free_rows(self) -> int | None:
        if self._capacity is None:
            return None
        return self._capacity - sum(len(rows) for rows in self._rows.values())

    def check(self) -> None:
        super().check()
        free = self.free_rows()
        assert free is None or free >= 0, (self._table.lengths(), self._capacity)

    def _append(self, segment: PlacedSegment) -> tuple[Dist, ...]:
        rows = self._rows.setdefault(segment.seq, [])
        committed = segment.start - segment.num_open_rows
        before = rows[committed - 1] if committed else None
        tree = rows[committed:]  # rows of the open tree, then the new ones
        for i, token in enumerate(segment.tokens, segment.num_open_rows):
            parent = i - 1 if segment.parents is None else segment.parents[i]
            tree.append(self._row(tree[parent] if parent >= 0 else before, token))
        new = tree[segment.num_open_rows :]
        rows.extend(new)
        # equal positions prove that the rows continue the ones that the caller expects
        assert tuple(row.position for row in new) == segment.positions()
        return tuple(self._dist(new[i]) for i in segment.wanted)

    def _row(self, parent: FakeRow | None, token: int) -> FakeRow:
        if parent is None:
            return FakeRow(token, 0, mixed_number(self._key + token), (token % VOCAB,), 1)
        recent = (*parent.recent, token % VOCAB)[-self._num_recent :]
        answer_rows = 0 if recent[-len(_ANSWER_MARK) :] == _ANSWER_MARK else parent.answer_rows + 1
        digest = mixed_number((parent.digest * 3 + token) & _MASK)
        return FakeRow(token, parent.position + 1, digest, recent, answer_rows)

    def _dist(self, row: FakeRow) -> Dist:
        support, base = self._base_model.base(row.recent[-3:])
        key = row.digest
        if self._order is not None:
            key = self._key
            for token in row.recent[-self._order :]:
                key = mixed_number((key * 3 + token) & _MASK)
        own = np.log(uniforms(key, len(support))) ** 2  # squared exponentials: uneven, so that prompts differ
        probs = np.zeros(self._info.vocab_size)
        probs[support] = (1.0 - self._spread) * base + self._spread * (own / own.sum())
        if self._base_model.may_end(row.recent[-3:]):
            end_prob = self._end_prob(row)
            probs *= 1.0 - end_prob
            probs[EOS] = end_prob
        return Dist.dense(probs)

    @staticmethod
    def _end_prob(row: FakeRow) -> float:
        """Probability that the answer ends after this row. Half of all answers are shorter than about 65 rows."""
        hazard = 0.001 + 0.002 * max(0, row.answer_rows - 40)
        return min(0.9, hazard * (6.0 if row.token in _SENTENCE_ENDS else 1.0))


def fake_model(seed: int = 0, spread: float = SPREAD, capacity_rows: int | None = None) -> LoadedModel:
    """The model of `--model fake`, `fake:SEED` and `fake:SEED:SPREAD`."""
    return LoadedModel(FakeEngine(seed, spread=spread, capacity_rows=capacity_rows), ByteTokenizer())
