"""What is asked of rows at the last stage, and what was sampled there: no row of the vocabulary crosses the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.sampler import RowHead, RowSampling, SampledRow
from paceline.wire.codec import sampling_from_wire, sampling_to_wire
from paceline.wire.messages import Count, Sampling, SentPart, Token
from paceline.wire.stages.messages import MAX_ROWS, Kept, Number, Numbered, RowIndices, Sentence, StageFrame, bad_frame

MAX_BRANCHES = 256
Bytes = Annotated[bytes, msgspec.Meta(max_length=1 << 23)]


class SparseDist(SentPart, frozen=True):
    """`Dist`: ids as int32, probabilities as float64, little-endian."""

    ids: Bytes
    probs: Bytes
    tail: float
    log_norm: float


class WantedRow(SentPart, frozen=True):
    """`RowSampling`."""

    params: Sampling
    position: Number
    vocab_size: Count
    counts: Annotated[list[tuple[Token, Count]], msgspec.Meta(max_length=1 << 20)]
    prompt: Bytes | None  # ids as int32
    allowed: Bytes | None  # a bit for each id
    num_allowed: Count  # bits in it
    num_top: Count


class HeadRow(SentPart, frozen=True):
    """`RowHead`."""

    dist: SparseDist
    best: Bytes  # int32
    scores: Bytes  # float64
    max_score: float
    max_prob: float


class SampledToken(SentPart, frozen=True):
    """`SampledRow`. has_dists: the branches' distributions may be asked for."""

    token: Token
    top: SparseDist | None
    branch_probs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
    head: HeadRow | None
    branch_heads: Annotated[tuple[SparseDist, ...], msgspec.Meta(max_length=MAX_BRANCHES)]


class MixtureRows(SentPart, frozen=True):
    """`BranchMixture`."""

    log_weights: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
    evidence: Annotated[tuple[tuple[float, ...], ...], msgspec.Meta(max_length=MAX_ROWS)]
    rescoring: bool
    parents: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ROWS)]
    tokens: Annotated[tuple[Token, ...], msgspec.Meta(max_length=MAX_ROWS)]
    prompts: Annotated[tuple[Bytes | None, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
    heads: bool


SegmentOf = tuple[Number, Count]  # ticket, number of the segment in it
WantedRows = Annotated[list[WantedRow], msgspec.Meta(max_length=MAX_ROWS)]


class Wanted(SentPart, frozen=True):
    """`SampleRequest`: of each branch its parts."""

    branches: Annotated[
        list[Annotated[list[SegmentOf], msgspec.Meta(max_length=MAX_ROWS)]], msgspec.Meta(max_length=MAX_BRANCHES)
    ]
    rows: WantedRows
    mixture: MixtureRows | None


class SampleAhead(StageFrame, frozen=True, tag="ahead"):
    """How the rows of a batch will be sampled, by segment; sampled as soon as they are computed. None: unknown."""

    ticket: Number
    rows: Annotated[list[WantedRows | None], msgspec.Meta(max_length=MAX_ROWS)]


class SampleRows(Numbered, frozen=True, tag="sample"):
    """Sample rows that have been computed. Answered by `SampledRows`, or `RequestFailed`."""

    wanted: Annotated[list[Wanted], msgspec.Meta(max_length=MAX_ROWS)]


class SampledRows(Numbered, frozen=True, tag="sampled"):
    rows: Annotated[list[list[SampledToken]], msgspec.Meta(max_length=MAX_ROWS)]


class BatchDone(StageFrame, frozen=True, tag="done"):
    """From the last stage: a batch has run. kept: which of each segment's wanted rows were scored; None: all."""

    epoch: Number
    ticket: Number
    kept: Kept
    sizes: RowIndices  # by segment: rows scored
    sampled: Annotated[list[list[SampledToken] | None], msgspec.Meta(max_length=MAX_ROWS)]  # by `SampleAhead`
    error: Sentence | None


def row_to_wire(row: RowSampling) -> WantedRow:
    looks_back = row.params.looks_back  # else the counts are never read
    return WantedRow(
        sampling_to_wire(row.params),
        row.position,
        row.vocab_size,
        [(int(token), int(count)) for token, count in row.counts.items()] if looks_back else [],
        None if row.prompt is None else _ids_to_bytes(row.prompt),
        None if row.allowed is None else np.packbits(row.allowed, bitorder="little").tobytes(),
        0 if row.allowed is None else len(row.allowed),
        row.num_top,
    )


def row_from_wire(row: WantedRow) -> RowSampling:
    """Raises RemoteProtocolError."""
    allowed = None
    if row.allowed is not None:
        if len(row.allowed) != -(-row.num_allowed // 8):
            raise bad_frame("a mask of another length")
        bits = np.unpackbits(np.frombuffer(row.allowed, np.uint8), count=row.num_allowed, bitorder="little")
        allowed = bits.astype(np.bool_)
        if not allowed.any():
            raise bad_frame("a mask that allows nothing")
    prompt = None if row.prompt is None else _ids_from_bytes(row.prompt)
    params = sampling_from_wire(row.params)
    return RowSampling(params, row.position, row.vocab_size, dict(row.counts), prompt, allowed, row.num_top)


def sampled_to_wire(row: SampledRow) -> SampledToken:
    return SampledToken(
        row.token,
        None if row.top is None else _dist_to_wire(row.top),
        row.branch_probs,
        None if row.head is None else _head_to_wire(row.head),
        tuple(map(_dist_to_wire, row.branch_heads)),
    )


def sampled_from_wire(row: SampledToken) -> SampledRow:
    """Without `dists`. Raises RemoteProtocolError."""
    return SampledRow(
        row.token,
        None if row.top is None else _dist_from_wire(row.top),
        row.branch_probs,
        None if row.head is None else _head_from_wire(row.head),
        tuple(map(_dist_from_wire, row.branch_heads)),
    )


def mixture_to_wire(mixture: BranchMixture) -> MixtureRows:
    prompts = tuple(None if prompt is None else _ids_to_bytes(prompt) for prompt in mixture.prompts)
    scores = mixture.log_weights, mixture.evidence, mixture.rescoring
    return MixtureRows(*scores, mixture.parents, mixture.tokens, prompts, mixture.heads)


def mixture_from_wire(mixture: MixtureRows) -> BranchMixture:
    prompts = tuple(None if prompt is None else _ids_from_bytes(prompt) for prompt in mixture.prompts)
    scores = mixture.log_weights, mixture.evidence, mixture.rescoring
    return BranchMixture(*scores, mixture.parents, mixture.tokens, prompts, mixture.heads)


def _head_to_wire(head: RowHead) -> HeadRow:
    return HeadRow(
        _dist_to_wire(head.dist),
        _ids_to_bytes(head.best),
        head.scores.astype("<f8").tobytes(),
        head.max_score,
        head.max_prob,
    )


def _head_from_wire(head: HeadRow) -> RowHead:
    best, scores = _ids_from_bytes(head.best).astype(np.intp), _floats(head.scores)
    dist = _dist_from_wire(head.dist)
    if len(best) != len(scores) or (len(best) and not 0 <= int(best.min()) <= int(best.max()) < len(dist.ids)):
        raise bad_frame("a head with places outside its ids")
    return RowHead(dist, best, scores, head.max_score, head.max_prob)


def _dist_to_wire(dist: Dist) -> SparseDist:
    return SparseDist(_ids_to_bytes(dist.ids), dist.probs.astype("<f8").tobytes(), dist.tail, dist.log_norm)


def _dist_from_wire(dist: SparseDist) -> Dist:
    ids, probs = _ids_from_bytes(dist.ids), _floats(dist.probs)
    if len(ids) != len(probs) or (len(ids) > 1 and not (np.diff(ids) > 0).all()):
        raise bad_frame("a distribution whose ids do not rise, or not as many as its probabilities")
    return Dist(ids, probs, dist.tail, dist.log_norm)


def _ids_to_bytes(ids: np.ndarray[tuple[int], np.dtype[np.integer]] | IdArray) -> bytes:
    return np.asarray(ids).astype("<i4").tobytes()


def _ids_from_bytes(data: bytes) -> IdArray:
    return _numbers(data, "<i4").astype(np.int32)


def _floats(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return _numbers(data, "<f8").astype(np.float64)


def _numbers(data: bytes, kind: str) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if len(data) % np.dtype(kind).itemsize:
        raise bad_frame("an array that ends within a number")
    return np.frombuffer(data, kind)
