"""Engine over llama.cpp: quantised models of GGUF files, without torch.

Each sequence has a stream of the KV cache to itself, whose rows are always a prefix of one chain of tokens: what is
left out in the middle, or of another sequence between, would change the order in which llama.cpp sums over the cache,
and with weights of eight bits or fewer a token. So a tree is scored path by path, and rows that a prune or truncate
has put out of reach are computed again with the next segment. A block is a whole stream of the greatest length, and
what it held is kept when its sequence ends, for a later prompt of the same salt.

The memory of all streams is written when llama.cpp makes them. So there is a short one at first, and a larger cache
takes its place, with what it holds, once more sequences or longer ones are there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import psutil

from paceline.core.batching.block_manager import KvPrefix, OutOfBlocks
from paceline.core.batching.segment import Batch, PlacedSegment, SeqId, common_length
from paceline.core.sampling.sampler import SampledRow
from paceline.engine.base import ModelInfo, Output, SampleRequest
from paceline.engine.llama_cpp.library import MOST_ROWS, LlamaContext, Scores, Stretch, measured
from paceline.engine.model_config import sampling_defaults
from paceline.engine.sampling.row_kernel import HostLogits, sample_host_rows
from paceline.engine.sequence_table import TableEngine
from paceline.errors import ConfigError, EngineError
from paceline.hub.gguf import GgufModel, kept_as
from paceline.system import in_own_thread, usable_cores, usable_memory

log = logging.getLogger("paceline.engine")

BACKEND: Final = "llama_cpp"
_LEAST_STREAMS: Final = 4  # that memory is divided into, and that keep rows for later prompts
_STREAMS: Final = 16  # that it is divided into where each then has more than `_ROWS`
_MOST_STREAMS: Final = 64
_ROWS: Final = 4096
_MOST_ROWS: Final = 32_768
_LEAST_ROWS: Final = 256  # a question and an answer
_SIZE: Final = 8  # bytes before a stream's exported content that say how long it is
_CARRIER: Final = "float32"  # of exported content: four bytes to a number


@dataclass(slots=True, eq=False)
class Stream:
    """Rows in llama.cpp's cache, of a sequence or of one that has ended."""

    number: int
    tokens: list[int] = field(default_factory=list)  # whose rows are there, from position 0
    salt: str | None = None  # who may use them; None: nobody
    used: int = 0  # time of its last use, in uses


@dataclass(slots=True, eq=False)
class _Pass:
    """A chain that a stream is brought to, and which of its positions are to be scored."""

    stream: Stream
    tokens: list[int]
    wanted: dict[int, int]  # position → row of the segment
    into: list[Scores | None]  # by row of the segment
    at: int = 0  # rows of the chain that are there

    def next_rows(self) -> int:
        return min(len(self.tokens) - self.at, MOST_ROWS)


class LlamaCppEngine(TableEngine):
    """The engine contract over a context of llama.cpp. Made by `load_gguf`."""

    def __init__(self, model: LlamaContext, info: ModelInfo, streams: int) -> None:
        """streams: at most."""
        super().__init__(info)
        self._model, self._most_streams = model, streams
        self._streams: dict[SeqId, Stream] = {}
        self._salts: dict[SeqId, str] = {}  # of sequences that have begun with one
        self._free = [Stream(number) for number in range(model.num_streams)]
        self._uses = 0

    def forward(self, batch: Batch) -> Output:
        placed = self._table.place(batch)
        new = [segment.seq for segment in placed if segment.seq not in self._streams]
        self._require_free(len(new))
        rows: list[list[Scores | None]] = [[None] * len(segment.tokens) for segment in placed]
        try:
            for seq in new:
                self._take(seq)
            rounds = [list(self._passes(segment, into)) for segment, into in zip(placed, rows, strict=True)]
            for step in range(max(map(len, rounds), default=0)):
                self._run([passes[step] for passes in rounds if step < len(passes)])
        except EngineError:
            for seq in new:
                self._give_back(seq)
            raise
        self._table.written(placed)
        scored = [
            HostLogits(self._together([scores for row in segment.wanted if (scores := into[row]) is not None]))
            for segment, into in zip(placed, rows, strict=True)
        ]
        return Output(tuple(scored), tuple(segment.scored for segment in placed))

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
        return sample_host_rows(requests)

    def prune(self, seq: SeqId, keep: Sequence[int], live: Sequence[int] = (), horizon: int | None = None) -> None:
        if seq not in self._streams and horizon is not None:
            self._require_free(1)  # it has overtaken all rows of the sequence
        self._table.prune(seq, keep, live, horizon)
        if seq not in self._streams:
            self._take(seq)

    def truncate(self, seq: SeqId, length: int) -> None:
        self._table.truncate(seq, length)

    def export_kv(self, seq: SeqId, tokens: Sequence[int]) -> KvPrefix:
        self._table.export(seq, len(tokens))
        stream, wanted = self._streams[seq], list(self._table.tokens(seq)[: len(tokens)])
        self._run([_Pass(stream, wanted, {}, [])])
        self._shorten(stream, len(wanted))
        content = self._model.state(stream.number)
        words = -(-(_SIZE + len(content)) // (4 * len(tokens)))  # of a row
        packed = np.zeros(4 * words * len(tokens), np.uint8)
        packed[:_SIZE] = np.frombuffer(len(content).to_bytes(_SIZE, "little"), np.uint8)
        packed[_SIZE : _SIZE + len(content)] = np.frombuffer(content, np.uint8)
        keys = packed.view("<f4").reshape(1, len(tokens), 1, words)
        return KvPrefix(self._info.fingerprint, _CARRIER, tuple(tokens), keys, keys[..., :0])

    def import_kv(self, seq: SeqId, rows: KvPrefix) -> None:
        if rows.model != self._info.fingerprint or rows.dtype != _CARRIER:
            raise EngineError("the rows are another model's, or of another format")
        packed = np.ascontiguousarray(rows.keys).view(np.uint8).reshape(-1)
        size = int.from_bytes(packed[:_SIZE].tobytes(), "little")
        if not 0 < size <= len(packed) - _SIZE:
            raise EngineError("the stored rows were cut")
        self._require_free(1)
        self._grow(len(rows.tokens), 0)
        self._table.adopt(seq, rows.tokens)
        stream = self._take(seq)
        try:
            self._model.restore(stream.number, packed[_SIZE : _SIZE + size].tobytes())
            if self._model.length(stream.number) != len(rows.tokens):
                self._model.shorten(stream.number, 0)
                raise EngineError("the stored rows are not those of their tokens")
        except EngineError:
            self._table.release(seq)
            self._give_back(seq)
            raise
        stream.tokens = list(rows.tokens)

    def begin(self, seq: SeqId, tokens: Sequence[int], salt: str, stored: KvPrefix | None = None) -> int:
        if seq in self._table or seq in self._salts:
            raise EngineError(f"sequence {seq} exists already")
        self._salts[seq] = salt
        cached = max((self._shared(stream, tokens, salt) for stream in self._all()), default=0)
        if imported := self._import_longer(seq, stored, cached, len(tokens)):
            return imported
        rows = min(cached, len(tokens) - 1)
        if not rows or len(self._streams) == self._most_streams:
            return 0
        self._table.adopt(seq, tokens[:rows])
        source = max(self._all(), key=lambda stream: (self._shared(stream, tokens, salt), stream in self._free))
        stream = self._take(seq, source if source in self._free else None)
        if stream is not source:
            self._copy(source, stream)
        return rows

    def release(self, seq: SeqId) -> None:
        self._table.release(seq)
        self._give_back(seq)
        self._salts.pop(seq, None)

    @property
    def block_size(self) -> int:
        """Rows of a stream."""
        return self._info.max_positions

    def free_rows(self) -> int | None:
        return (self._most_streams - len(self._streams)) * self.block_size

    def check(self) -> None:
        numbers = sorted(stream.number for stream in self._all())
        assert numbers == list(range(self._model.num_streams)), numbers
        lengths = self._table.lengths()
        assert self._streams.keys() == lengths.keys(), (self._streams, lengths)
        for stream in self._all():
            assert self._model.length(stream.number) == len(stream.tokens), stream

    def _together(self, rows: Sequence[Scores]) -> Scores:
        return rows[0][None] if len(rows) == 1 else np.array(rows, np.float32).reshape(-1, self._info.vocab_size)

    def _all(self) -> list[Stream]:
        return [*self._free, *self._streams.values()]

    def _require_free(self, count: int) -> None:
        if count > (free := self._most_streams - len(self._streams)):
            raise OutOfBlocks(f"{count} sequences need a stream of the KV cache, {free} are free")

    def _grow(self, rows: int, streams: int) -> None:
        """Have streams of at least so many rows, and so many streams. Of longer ones there are as many as are in use.

        Raises EngineError where the machine has no memory for them.
        """
        model, live = self._model, sorted(self._streams.values(), key=lambda each: each.number)
        if rows <= model.capacity and streams <= model.num_streams:
            return
        streams = max(1, streams, len(live) if rows > model.capacity else model.num_streams)
        streams = min(1 << (streams - 1).bit_length(), self._most_streams)
        kept = [*live, *sorted(self._free, key=lambda each: -each.used)][:streams]
        longer = max(rows, 2 * model.capacity) if rows > model.capacity else model.capacity
        model.resize(longer, streams, [each.number for each in kept])
        for number, stream in enumerate(kept):
            stream.number = number
        self._free = [*kept[len(live) :], *(Stream(number) for number in range(len(kept), streams))]
        log.debug("the KV cache has %d streams of %d rows now", streams, model.capacity)

    def _shared(self, stream: Stream, tokens: Sequence[int], salt: str) -> int:
        """Rows of the stream that a prompt of this salt may begin with. Those of drafts are left out."""
        if stream.salt != salt:
            return 0
        owner = next((seq for seq, each in self._streams.items() if each is stream), None)
        known = stream.tokens if owner is None else list(self._table.tokens(owner))
        return common_length(known, list(tokens))

    def _take(self, seq: SeqId, stream: Stream | None = None) -> Stream:
        """Give the sequence this free stream with its rows, or else an empty one: the one unused for longest."""
        if stream is None:
            if all(each.tokens for each in self._free):
                kept = min(_LEAST_STREAMS, self._most_streams)
                self._grow(0, max(len(self._streams) + 1, min(self._model.num_streams + 1, kept)))
            stream = min(self._free, key=lambda each: (bool(each.tokens), each.used, each.number))
            self._shorten(stream, 0)
        self._free.remove(stream)
        stream.salt = self._salts.get(seq)
        self._streams[seq] = stream
        return stream

    def _give_back(self, seq: SeqId) -> None:
        if (stream := self._streams.pop(seq, None)) is not None:
            self._uses += 1
            stream.used = self._uses
            if stream.salt is None:
                self._shorten(stream, 0)
            self._free.append(stream)

    def _copy(self, source: Stream, into: Stream) -> None:
        if source.tokens:
            self._model.restore(into.number, self._model.state(source.number))
        into.tokens = list(source.tokens)

    def _shorten(self, stream: Stream, length: int) -> None:
        if len(stream.tokens) > length:
            self._model.shorten(stream.number, length)
            del stream.tokens[length:]

    def _passes(self, segment: PlacedSegment, into: list[Scores | None]) -> Iterator[_Pass]:
        """Chains whose passes score the segment's rows: one, or one for each leaf of a tree, neighbours in turn."""
        stream, before = self._streams[segment.seq], self._table.tokens(segment.seq)
        wanted = set(segment.wanted)
        if segment.parents is None:
            by_position = {len(before) + row: row for row in wanted}
            yield _Pass(stream, [*before, *segment.tokens], by_position, into)
            return
        opened = segment.num_open_rows
        tokens = [*self._table.tree(segment.seq).tokens, *segment.tokens]
        needed = {opened + row for row in wanted}
        for row, parent in reversed(list(enumerate(segment.parents))):
            if row in needed and parent >= 0:
                needed.add(parent)
        children: dict[int, list[int]] = {}
        for row in sorted(needed, reverse=True):
            children.setdefault(segment.parents[row], []).append(row)
        walk = [[row] for row in children.get(-1, ())]
        while walk:
            path = walk.pop()
            below = children.get(path[-1], ())
            walk += [[*path, child] for child in below]
            if not below:
                rows = {len(before) + depth: each - opened for depth, each in enumerate(path)}
                scored = {position: each for position, each in rows.items() if each in wanted}
                yield _Pass(stream, [*before, *(tokens[each] for each in path)], scored, into)

    def _run(self, passes: Sequence[_Pass]) -> None:
        """Bring each stream to its chain, and keep the scores that are wanted and not known yet."""
        self._grow(max((len(each.tokens) for each in passes), default=0), 0)
        for each in passes:
            unknown = [position for position, row in each.wanted.items() if each.into[row] is None]
            each.at = min([common_length(each.stream.tokens, each.tokens), *unknown])
            self._shorten(each.stream, each.at)
        waiting = sorted(passes, key=lambda each: each.stream.number)
        while waiting := [each for each in waiting if each.next_rows()]:
            first, *others = waiting
            group, size = [first], first.next_rows()
            for each in others:
                follows = each.stream.number == group[-1].stream.number + 1
                if not follows or each.next_rows() != size or size * (len(group) + 1) > MOST_ROWS:
                    break
                group.append(each)
            self._decode(group, size)

    def _decode(self, group: Sequence[_Pass], size: int) -> None:
        stretches = []
        for each in group:
            rows = (each.wanted.get(position) for position in range(each.at, each.at + size))
            scored = [row is not None and each.into[row] is None for row in rows]
            stretches.append(Stretch(each.stream.number, each.at, each.tokens[each.at : each.at + size], scored))
        for each, found in zip(group, self._model.decode(stretches), strict=True):
            for position, scores in enumerate(found, each.at):
                if scores is not None:
                    each.into[each.wanted[position]] = scores
            each.stream.tokens += each.tokens[each.at : each.at + size]
            each.at += size


def load_gguf(
    model: GgufModel,
    *,
    name: str,
    threads: int | None = None,
    kv_rows: int | None = None,
    kv_mib: int | None = None,
    streams: int = _LEAST_STREAMS,
) -> LlamaCppEngine:
    """Open the model of a GGUF file. threads: at most; None for one a physical core. kv_rows, kv_mib: of all streams
    together at most; default: a quarter of the free memory. streams: at least so many.

    Raises ConfigError where llama.cpp is missing, or does not load the file.
    """
    size = kv_mib << 20 if kv_mib else usable_memory()[0] // 4
    rows = kv_rows or size // model.row_bytes
    longest = rows // streams if rows < streams * _ROWS else max(_ROWS, rows // _STREAMS)
    longest = max(1, min(model.context, longest, _MOST_ROWS))
    if kv_mib is not None and longest < (least := min(_LEAST_ROWS, model.context)):
        needed = -(-streams * least * model.row_bytes >> 20)
        raise ConfigError(
            f"{kv_mib} MiB have room for {longest} tokens of an answer by {name}: give --kv-mib {needed}."
        )
    streams = max(streams, min(rows // longest, _MOST_STREAMS))
    threads = threads or min(usable_cores(), psutil.cpu_count(logical=False) or 1)
    context = LlamaContext(model.path, rows=longest, threads=threads, grows=model.grows)
    kept = f"llama.cpp/{model.fingerprint}.json"
    context.least_rows, context.is_exact = measured(kept, threads, lambda: in_own_thread(context.exactness))
    info = ModelInfo(
        name=name,
        fingerprint=model.fingerprint,
        vocab_size=context.vocab_size,
        max_positions=longest,
        dtype=model.number_format,
        backend=BACKEND,
        sampling=sampling_defaults(model.folder),
        num_weights=context.num_weights,
        doubt="" if context.is_exact else "numbers of a row depend on how many are computed with it",
        kept_as=kept_as(model.path),
    )
    exact = f"approximate: {info.doubt}" if info.doubt else "exact"
    rest = ", a row is never computed alone" if context.least_rows > 1 else ""
    log.info(
        "%s runs on llama.cpp with %d threads: %s, at most %d sequences of %d tokens, %s%s",
        *(name, threads, model.number_format, streams, longest, exact, rest),
    )
    return LlamaCppEngine(context, info, streams)
