"""A seeded table model over bytes: the tests' double, the simulator's engine, and `--model fake`. No torch.

next = (1 - spread) * base(last two tokens) + spread * own(hash of the whole prefix), so two prompts mostly agree, yet
a wrong, missing or reordered row of KV changes every later distribution. It never reads a row that was not written:
the rows it keeps are all it knows. Knows nothing of language beyond a word list; its text is noise with spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256

import numpy as np
from numpy.typing import NDArray

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine, LoadedModel, ModelInfo, Output
from paceline.engine.fake.bigram_model import BigramModel
from paceline.engine.fake.tokenizer import EOS, VOCAB, ByteTokenizer
from paceline.engine.sequence_table import SequenceTable
from paceline.engine.wrappers import WrappedEngine
from paceline.errors import EngineError

_MASK = (1 << 64) - 1
SPREAD = 0.15
_ROOT = 0x9E3779B97F4A7C15
_SENTENCE_ENDS = frozenset(b".!?")
_MARK = tuple(b"assistant: ")  # an answer's rows are counted from here; the model itself never writes a colon


def _mixed(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood 2014): a 64-bit hash of a 64-bit value."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _uniforms(key: int, count: int) -> NDArray[np.float64]:
    """(count,) numbers in (0, 1) that depend on `key` alone."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_ROOT) + np.uint64(key)
    steps = (steps ^ (steps >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    steps = (steps ^ (steps >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits: NDArray[np.float64] = ((steps ^ (steps >> np.uint64(31))) >> np.uint64(11)).astype(np.float64)
    return (bits + 0.5) / 2.0**53


@dataclass(frozen=True, slots=True)
class _Row:
    """What the model keeps of one row: all that a later row may read through it."""

    token: int
    position: int
    digest: int  # hash of all tokens up to here
    recent: tuple[int, ...]  # the last tokens as they are read, newest last: enough for the base, the mark and `order`
    answered: int  # rows since the end of the last mark, or since the beginning


class FakeEngine:
    """The engine contract on tables. `order` None: `own` depends on the whole prefix, else on so many last tokens.

    `capacity_rows` bounds the rows of all sequences together, to try what happens when memory runs out: a batch that
    does not fit is refused whole. The probability of the end grows with the answer, so that both greedy and sampled
    answers end, typically after 30 to 120 tokens.
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
        """vocab_size: ids beyond the bytes and the end are read as one of these, and never said."""
        if not 0.0 <= spread <= 1.0 or (order is not None and order < 1):
            raise EngineError(f"spread must be in 0..1 and order at least 1, got {spread} and {order}")
        if vocab_size < VOCAB:
            raise EngineError(f"the fake model knows {VOCAB} ids, not {vocab_size}")
        wider = "" if vocab_size == VOCAB else f" {vocab_size}"
        identity = sha256(f"paceline fake 1 {seed} {order} {spread}{wider}".encode()).hexdigest()
        self._info = ModelInfo("fake", identity, vocab_size, max_positions, "float64", "fake")
        self._key = _mixed(seed & _MASK ^ _ROOT)
        self._order, self._spread = order, spread
        self._remember = max(len(_MARK), order or 0)
        self._table = BigramModel(seed)
        self._capacity = capacity_rows
        self._ledger = SequenceTable(vocab_size=vocab_size, max_positions=max_positions)
        self._rows: dict[SeqId, list[_Row]] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        self._ledger.validate(batch)
        free = self.free_rows()
        if free is not None and batch.num_rows > free:
            raise OutOfBlocks(f"out of memory: {batch.num_rows} rows asked for, {free} free")
        dists = tuple(self._append(segment) for segment in batch.segments)
        self._ledger.written(batch)
        return Output(dists)

    def commit(self, seq: SeqId, keep: Sequence[int], rest: Sequence[int] = ()) -> None:
        kept = self._ledger.commit(seq, keep, rest)
        rows = self._rows[seq]
        rows[kept.first :] = [rows[kept.first + row] for row in kept.order]

    def truncate(self, seq: SeqId, length: int) -> None:
        self._ledger.truncate(seq, length)
        if seq in self._rows:
            del self._rows[seq][length:]

    def fork(self, seq: SeqId, into: SeqId) -> None:
        rows = self._ledger.length(seq)
        free = self.free_rows()
        if free is not None and rows > free:
            raise OutOfBlocks(f"out of memory: a fork of {rows} rows asked for, {free} free")
        self._ledger.fork(seq, into)
        self._rows[into] = list(self._rows[seq])

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._ledger.export(seq, len(tokens))
        rows = self._rows[seq][: len(tokens)]
        assert [row.token for row in rows] == list(tokens), "the caller must know what the rows hold"
        digests = np.array([row.digest for row in rows], dtype=np.uint64).view(np.int64)
        rest = np.array([(row.token, row.position, row.answered) for row in rows], dtype=np.int64)
        return KvPrefix(
            self._info.fingerprint, "int64", tuple(tokens), digests[None, :, None, None], rest[None, :, None]
        )

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        shapes = (1, len(rows.tokens), 1, 1), (1, len(rows.tokens), 1, 3)
        if rows.model != self._info.fingerprint or (rows.keys.shape, rows.values.shape) != shapes:
            raise EngineError(f"these rows are of another model: {rows.keys.shape} and {rows.values.shape}")
        free = self.free_rows()
        if free is not None and len(rows.tokens) > free:
            raise OutOfBlocks(f"out of memory: {len(rows.tokens)} rows to adopt, {free} free")
        self._ledger.adopt(seq, rows.tokens)
        digests = rows.keys.astype(np.int64).view(np.uint64).ravel().tolist()
        rest = rows.values.reshape(-1, 3).tolist()
        read = [token % VOCAB for token, _, _ in rest]
        self._rows[seq] = [
            _Row(token, position, digests[i], tuple(read[: i + 1][-self._remember :]), answered)
            for i, (token, position, answered) in enumerate(rest)
        ]

    def release(self, seq: SeqId) -> None:
        self._ledger.release(seq)
        self._rows.pop(seq, None)

    def length(self, seq: SeqId) -> int:
        return self._ledger.length(seq)

    @property
    def block_size(self) -> int:
        return 1

    def free_rows(self) -> int | None:
        if self._capacity is None:
            return None
        return self._capacity - sum(len(rows) for rows in self._rows.values())

    def check(self) -> None:
        held = {seq: len(rows) for seq, rows in self._rows.items()}
        assert held == self._ledger.lengths(), (held, self._ledger.lengths())
        assert self._capacity is None or sum(held.values()) <= self._capacity, (held, self._capacity)

    def _append(self, segment: Segment) -> tuple[Dist, ...]:
        """Write the rows of one segment; distributions of the wanted ones."""
        rows = self._rows.setdefault(segment.seq, [])
        committed = segment.start - segment.num_open_rows
        before = rows[committed - 1] if committed else None
        tree = rows[committed:]  # a tree's rows that are open already, then the new ones
        for i, token in enumerate(segment.tokens, segment.num_open_rows):
            parent = i - 1 if segment.parents is None else segment.parents[i]
            tree.append(self._row(tree[parent] if parent >= 0 else before, token))
        new = tree[segment.num_open_rows :]
        rows.extend(new)
        # the last row's position proves that the rows before it were those the caller meant
        assert tuple(row.position for row in new) == segment.positions()
        return tuple(self._dist(new[i]) for i in segment.logits_rows())

    def _row(self, above: _Row | None, token: int) -> _Row:
        if above is None:
            return _Row(token, 0, _mixed(self._key + token), (token % VOCAB,), 1)
        recent = (*above.recent, token % VOCAB)[-self._remember :]
        answered = 0 if recent[-len(_MARK) :] == _MARK else above.answered + 1
        digest = _mixed((above.digest * 3 + token) & _MASK)
        return _Row(token, above.position + 1, digest, recent, answered)

    def _dist(self, row: _Row) -> Dist:
        support, base = self._table.base(row.recent[-3:])
        key = row.digest
        if self._order is not None:
            key = self._key
            for token in row.recent[-self._order :]:
                key = _mixed((key * 3 + token) & _MASK)
        own = np.log(_uniforms(key, len(support))) ** 2  # squared exponentials: uneven, so that prompts do differ
        probs = np.zeros(self._info.vocab_size)
        probs[support] = (1.0 - self._spread) * base + self._spread * (own / own.sum())
        if self._table.may_end(row.recent[-3:]):
            end = self._end(row)
            probs *= 1.0 - end
            probs[EOS] = end
        return Dist.dense(probs)

    @staticmethod
    def _end(row: _Row) -> float:
        """Probability that the answer ends here. Half of all answers are shorter than about 65 rows."""
        hazard = 0.001 + 0.002 * max(0, row.answered - 40)
        return min(0.9, hazard * (6.0 if row.token in _SENTENCE_ENDS else 1.0))


class NoisyEngine(WrappedEngine):
    """Another engine whose distributions are wrong on a share `rate` of the rows: a drafter that is sometimes right.

    Which rows are wrong, and how, follows from the true distribution alone, so the laws of the contract still hold.
    A wrong row keeps the support of the true one, and its probabilities are those of other tokens.
    """

    def __init__(self, engine: Engine, rate: float) -> None:
        super().__init__(engine)
        self._rate = rate
        info = engine.info
        self._info = replace(
            info, name=f"noisy {info.name}", fingerprint=sha256(f"{info.fingerprint} {rate}".encode()).hexdigest()
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        output = super().forward(batch)
        return Output(tuple(tuple(self._spoiled(dist) for dist in dists) for dists in output.dists))

    def _spoiled(self, dist: Dist) -> Dist:
        digest = int.from_bytes(blake2b(dist.probs.tobytes(), digest_size=8).digest(), "little")
        support = np.flatnonzero(dist.probs)
        if len(support) < 2 or (digest >> 11) / 2.0**53 >= self._rate:
            return dist
        probs = dist.probs.copy()
        probs[support] = np.roll(dist.probs[support], 1 + digest % (len(support) - 1))
        return Dist(dist.ids, probs, dist.tail)


class ArbitraryEngine(WrappedEngine):
    """Another engine whose laws are replaced by arbitrary ones: anything may follow anything, the end included.

    For what must hold whatever a model says. Each law follows from the one it replaces, so the contract still holds.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        identity = sha256(f"{engine.info.fingerprint} arbitrary".encode()).hexdigest()
        self._info = replace(engine.info, name=f"arbitrary {engine.info.name}", fingerprint=identity)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def forward(self, batch: Batch) -> Output:
        output = super().forward(batch)
        return Output(tuple(tuple(self._law(dist) for dist in dists) for dists in output.dists))

    @staticmethod
    def _law(dist: Dist) -> Dist:
        key = int.from_bytes(blake2b(dist.probs.tobytes(), digest_size=8).digest(), "little")
        probs = np.log(_uniforms(key, len(dist.ids))) ** 4  # uneven: a few tokens have most of it
        return Dist.dense(probs / probs.sum())


def arbitrary(engine: Engine) -> ArbitraryEngine:
    """It owns `engine`'s sequences from now on."""
    return ArbitraryEngine(engine)


def noisy(engine: Engine, rate: float) -> NoisyEngine:
    """A drafter that is wrong at `rate` of its rows, 0 to 1. It owns `engine`'s sequences from now on."""
    return NoisyEngine(engine, rate)


def fake_model(seed: int = 0, spread: float = SPREAD) -> LoadedModel:
    """What `--model fake`, `fake:SEED` and `fake:SEED:SPREAD` load."""
    return LoadedModel(FakeEngine(seed, spread=spread), ByteTokenizer())
