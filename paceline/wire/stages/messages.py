"""Messages between the head of a pipeline and its stages, and between neighbouring stages.

On the control link the head commands, and every stage gets all commands in one order; a batch names its rows by token,
parent and id, never by a mask. On the link between two stages go hidden rows alone, as bulk messages with the header
`HiddenRows`. Every field has a limit; those of a segment, which is sent as it is, are checked by it and bounded by its
frame. A change of a tag or field raises the link's version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias, get_args, get_origin

import msgspec
import numpy as np

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.block_manager import CARRIERS, KvPrefix
from paceline.core.batching.segment import ROOT, Batch, Segment
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow
from paceline.wire.close_codes import remote_fault
from paceline.wire.messages import Count, Frame, Hash, Name, PublicKey, SentPart, Token

# Number format of hidden rows on their way, little-endian.
RowFormat = Literal["bfloat16", "float16", "float32"]
ROW_FORMATS: tuple[RowFormat, ...] = ("bfloat16", "float16", "float32")

MAX_ROWS = 1 << 16  # of one batch
MAX_MESSAGE_BYTES = 1 << 24
MAX_BULK_BYTES = 1 << 30
MAX_SENTENCE = 2000  # characters of an error

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]  # of a ticket, a request or a sequence
SequenceNumber = Annotated[int, msgspec.Meta(ge=-(2**53), lt=2**53)]
NodeId = Annotated[int, msgspec.Meta(ge=ROOT, lt=2**53)]
Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE)]
Tokens = Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_ROWS)]
NodeIds = Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MAX_ROWS)]
RowIndices = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_ROWS)]
Kept: TypeAlias = Annotated[tuple[RowIndices | None, ...], msgspec.Meta(max_length=MAX_ROWS)]  # by segment; None: all
Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StageFrame(Frame, frozen=True):
    max_bytes = MAX_MESSAGE_BYTES


class Numbered(StageFrame, frozen=True):
    """Base of what is answered, and of answers: both have the number of the request."""

    request: Number


class BulkHeader(StageFrame, frozen=True):
    """Base of the headers of bulk messages."""


# ---- the stage describes itself -------------------------------------------------------------------------------------
class Describe(Numbered, frozen=True, tag="describe"):
    """Answered by `About`. measured: with what layers cost there, unless the stage was told its own."""

    measured: bool


class LoadSpan(Numbered, frozen=True, tag="load"):
    """Load these layers in place of any others. Answered by `About`, or by `RequestFailed` of this request."""

    first: Count
    stop: Count


class StageCost(SentPart, frozen=True):
    """What a stage has measured and found in its model's files, for the plan of spans."""

    layer_s: Seconds  # one layer's forward of one row
    head_s: Seconds  # likewise the final norm and the scores of the vocabulary
    layer_bytes: Number
    embedding_bytes: Number
    head_bytes: Number
    free_bytes: Number  # memory it may take


class About(Numbered, frozen=True, tag="about"):
    """What a stage is and has loaded."""

    model: Hash  # fingerprint
    dtype: Name
    layers: Positive  # of the whole model
    first: Count
    stop: Count  # equal to `first`: nothing is loaded
    width: Count  # numbers of a hidden row
    vocab_size: Count
    max_positions: Count
    block_size: Count  # of its KV cache
    capacity: Number  # rows of its KV cache
    resident_bytes: Number
    cost: StageCost | None  # None: it was told its layers, so nothing needs to be planned


class Assign(Numbered, frozen=True, tag="assign"):
    """A place in a pipeline: release everything, link to the neighbours. Answered by `RequestDone` or `RequestFailed`.

    epoch: of the pipeline; rises with each `Assign`. What comes of another one is dropped.
    """

    epoch: Number
    format: RowFormat
    previous_key: PublicKey | None  # of the stage before, which will dial; None: this is the first
    next_address: Name | None  # HOST:PORT of the stage behind, to be dialled; None: this is the last
    next_key: PublicKey | None


# ---- commands, in order ---------------------------------------------------------------------------------------------
class RunBatch(StageFrame, frozen=True, tag="batch"):
    """Run these segments: the first stage at once, the others on the hidden rows of this ticket."""

    ticket: Number
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_ROWS)]


class PruneRows(StageFrame, frozen=True, tag="prune"):
    """`SequenceEngine.prune`. One with a horizon may overtake the batches before it."""

    seq: SequenceNumber
    keep: NodeIds
    live: NodeIds
    horizon: NodeId | None


class TruncateRows(StageFrame, frozen=True, tag="truncate"):
    seq: SequenceNumber
    length: Number


class ReleaseRows(StageFrame, frozen=True, tag="release"):
    seq: SequenceNumber


Change: TypeAlias = PruneRows | TruncateRows | ReleaseRows
"""Of a sequence's rows, without an answer."""


class ExportRows(Numbered, frozen=True, tag="export"):
    """Answered by a bulk message of this request with the header `KvRows`, or `RequestFailed`."""

    seq: SequenceNumber
    tokens: Tokens


class ImportRows(Numbered, frozen=True, tag="import"):
    """Start a sequence with the rows of this request's bulk message. Answered by `RequestDone` or `RequestFailed`."""

    seq: SequenceNumber
    tokens: Tokens


class CheckRows(Numbered, frozen=True, tag="check"):
    """Check the invariants, behind everything sent before. Answered by `StageHave` or `RequestFailed`."""


# ---- results --------------------------------------------------------------------------------------------------------
class RequestDone(Numbered, frozen=True, tag="answered"):
    """What was asked for is done."""


class RequestFailed(Numbered, frozen=True, tag="failed"):
    reason: Sentence


class StageHave(Numbered, frozen=True, tag="have"):
    """What a stage holds: the rows of each sequence."""

    lengths: Annotated[tuple[tuple[SequenceNumber, Number], ...], msgspec.Meta(max_length=MAX_ROWS)]


class NeighbourLost(StageFrame, frozen=True, tag="lost"):
    """A link to a neighbour has ended, which the head must assign anew."""

    epoch: Number
    reason: Sentence


class Forget(StageFrame, frozen=True, tag="forget"):
    """The logits of these batches are not needed any more."""

    tickets: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_ROWS)]


class FetchScores(Numbered, frozen=True, tag="fetch"):
    """Send the scores of these rows: answered by a bulk message with the header `ScoreRows`, or `RequestFailed`."""

    ticket: Number
    segment: Count
    first: Count
    stop: Count


# ---- rows at the last stage, of which none of the vocabulary crosses the wire ---------------------------------------
# Values of `core` are sent as they are: maps by the names of their fields, arrays as bytes (`wire.codec`).
MAX_BRANCHES = 256
SegmentOf = tuple[Number, Count]  # ticket, number of the segment in it


class Wanted(SentPart, frozen=True):
    """`SampleRequest`: of each branch its parts. Of a segment alone, whose batch has not run, `rows` are all that it
    wants; those that a prune drops on the way are not sampled."""

    branches: Annotated[
        list[Annotated[list[SegmentOf], msgspec.Meta(max_length=MAX_ROWS)]], msgspec.Meta(max_length=MAX_BRANCHES)
    ]
    rows: Annotated[list[RowSampling], msgspec.Meta(max_length=MAX_ROWS)]
    mixture: BranchMixture | None


class SampleRows(Numbered, frozen=True, tag="sample"):
    """Sample rows as soon as they are computed. Answered by `SampledRows`, or `RequestFailed`."""

    wanted: Annotated[list[Wanted], msgspec.Meta(max_length=MAX_ROWS)]


class SampledRows(Numbered, frozen=True, tag="sampled"):
    rows: Annotated[list[list[SampledRow]], msgspec.Meta(max_length=MAX_ROWS)]

    def fault(self, vocab_size: int | None) -> str | None:
        del vocab_size
        for row in (row for rows in self.rows for row in rows):
            if not all(map(_is_sound, _dists_of(row))):
                return "a distribution whose ids do not rise, or not as many as its probabilities"
            if (head := row.head) is not None:
                best = head.best
                within = not len(best) or 0 <= int(best.min()) <= int(best.max()) < len(head.dist.ids)
                if len(best) != len(head.scores) or not within:
                    return "a head with places outside its ids"
        return None


class BatchDone(StageFrame, frozen=True, tag="done"):
    """From the last stage: a batch has run. kept: which of each segment's wanted rows were scored; None: all."""

    epoch: Number
    ticket: Number
    kept: Kept
    sizes: RowIndices  # by segment: rows scored
    error: Sentence | None


# ---- bulk messages --------------------------------------------------------------------------------------------------
class Credit(StageFrame, frozen=True, tag="credit"):
    """So many bytes of bulk messages more may be sent."""

    num_bytes: Number


class HiddenRows(BulkHeader, frozen=True, tag="hidden"):
    """To the next stage: the hidden rows of a batch, in order. error: the batch failed; it has no rows then."""

    epoch: Number
    ticket: Number
    kept: Kept  # rows of each segment that no prune has dropped on the way
    error: Sentence | None


class KvRows(BulkHeader, Numbered, frozen=True, tag="kv"):
    """Keys, then values, of a sequence's first rows: `core.batching.block_manager.KvPrefix`."""

    dtype: Name
    key_shape: tuple[Count, Count, Count, Count]
    value_shape: tuple[Count, Count, Count, Count]


class ScoreRows(BulkHeader, Numbered, frozen=True, tag="scores"):
    """Scores of the vocabulary before the softmax, in float32."""

    rows: Count
    vocab_size: Count


def kv_to_wire(request: int, rows: KvPrefix) -> tuple[KvRows, bytes]:
    """Header and payload of the bulk message."""
    shapes = [tuple(map(int, array.shape)) for array in (rows.keys, rows.values)]
    header = KvRows(request, rows.dtype, shapes[0], shapes[1])  # type: ignore[arg-type]  # `KvPrefix` has checked them
    return header, rows.keys.tobytes() + rows.values.tobytes()


def kv_from_wire(header: KvRows, payload: bytes | bytearray, model: str, tokens: Sequence[int]) -> KvPrefix:
    """Raises RemoteProtocolError for bytes that are not of these shapes."""
    carrier = CARRIERS.get(header.dtype)
    sizes = [math.prod(shape) for shape in (header.key_shape, header.value_shape)]
    if carrier is None or len(payload) != sum(sizes) * carrier.itemsize:
        raise remote_fault(f"{len(payload)} bytes for {header.key_shape} and {header.value_shape} of {header.dtype}")
    both = np.frombuffer(payload, carrier)
    keys, values = both[: sizes[0]].reshape(header.key_shape), both[sizes[0] :].reshape(header.value_shape)
    try:
        return KvPrefix(model, header.dtype, tuple(tokens), keys, values)
    except ValueError as error:
        raise remote_fault(str(error)) from error


def kept_of(asked: Batch, left: Batch) -> Kept:
    """Which rows of each segment of `asked` are in `left`, which lacks rows that a prune has dropped."""
    found = {segment.seq: segment for segment in left.segments}
    kept: list[RowIndices | None] = []
    for segment in asked.segments:
        other = found.get(segment.seq)
        if other is not None and len(other.tokens) == len(segment.tokens):
            kept.append(None)
            continue
        names = set() if other is None else set(other.node_ids)
        kept.append(tuple(row for row, name in enumerate(segment.node_ids) if name in names))
    return tuple(kept)


def without_others(asked: Batch, kept: Kept) -> Batch:
    """`asked` with these rows of each segment alone. Raises RemoteProtocolError for rows that it has not."""
    if len(kept) != len(asked.segments):
        raise remote_fault(f"rows of {len(kept)} segments for {len(asked.segments)}")
    left = [_only(segment, rows) for segment, rows in zip(asked.segments, kept, strict=True)]
    return Batch(tuple(segment for segment in left if segment is not None))


def _only(segment: Segment, rows: RowIndices | None) -> Segment | None:
    if rows is None:
        return segment
    if not rows:
        return None
    rising = all(a < b for a, b in pairwise(rows))
    if segment.parents is None or not rising or rows[-1] >= len(segment.tokens):
        raise remote_fault(f"rows {rows[:8]} of a segment with {len(segment.tokens)}")
    wanted = set(segment.logits_rows())
    ids, parents = segment.node_ids, segment.parents
    return Segment(
        segment.seq,
        segment.start,
        tuple(segment.tokens[row] for row in rows),
        tuple(parents[row] for row in rows),
        sum(row in wanted for row in rows),  # they are last
        tuple(ids[row] for row in rows),
    )


def row_to_wire(row: RowSampling) -> RowSampling:
    """Without counts that are never read."""
    return row if row.params.looks_back or not row.counts else msgspec.structs.replace(row, counts={})


def sampled_to_wire(row: SampledRow) -> SampledRow:
    """Without `dists`, and what is remembered of distributions."""
    top = None if row.top is None else _alone(row.top)
    head = None if row.head is None else replace(row.head, dist=_alone(row.head.dist))
    heads = tuple(map(_alone, row.branch_heads))
    return msgspec.structs.replace(row, top=top, head=head, branch_heads=heads, dists=None)


def _alone(dist: Dist) -> Dist:
    return replace(dist, memo={})


def array_from_wire(kind: object, data: object) -> object:
    """An array of a field's type from its bytes; of truth values perhaps with some more, none of them true. Raises
    TypeError and ValueError, as decoders' hooks do."""
    if get_origin(kind) is not np.ndarray or not isinstance(data, bytes):
        raise TypeError("this is not sent")
    dtype = np.dtype(get_args(get_args(kind)[1])[0])
    if dtype == np.bool_:
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.bool_)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)


def _dists_of(row: SampledRow) -> Iterator[Dist]:
    yield from row.branch_heads
    yield from () if row.top is None else (row.top,)
    yield from () if row.head is None else (row.head.dist,)


def _is_sound(dist: Dist) -> bool:
    return len(dist.ids) == len(dist.probs) and bool((np.diff(dist.ids) > 0).all())
