"""Scores of rows that stay at the last stage: handles of them at the head, and tokens that were sampled there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.engine.base import Logits, Output, SampleRequest
from paceline.runtime.stages.head.under_way import BatchUnderWay
from paceline.wire.stages.messages import MAX_MESSAGE_BYTES
from paceline.wire.stages.sampling import (
    Mixture,
    SampledToken,
    Wanted,
    WantedRow,
    mixture_to_wire,
    row_to_wire,
    sampled_from_wire,
)

_ROW_BYTES = 512  # of a wanted row without its mask, prompt and counts


class Fetch(Protocol):
    def __call__(self, ticket: int, segment: int, first: int, stop: int) -> tuple[Dist, ...]:
        """Distributions of rows that the last stage keeps. Waits. Raises EngineError."""


class BatchHandle:
    """As long as this object lives, the last stage keeps the scores of the batch."""

    __slots__ = ("__weakref__", "ticket")

    def __init__(self, ticket: int) -> None:
        self.ticket = ticket


@dataclass(frozen=True, slots=True, eq=False)
class FarLogits:
    """`Logits` of one segment at the last stage."""

    batch: BatchHandle
    segment: int
    size: int
    fetch: Fetch
    rows: tuple[RowSampling, ...] = ()  # how they were sampled as soon as they were computed; (): they were not
    sampled: tuple[SampledRow, ...] = ()

    def __len__(self) -> int:
        return self.size

    def dists(self) -> tuple[Dist, ...]:
        return self.fetch(self.batch.ticket, self.segment, 0, self.size)

    def dist(self, row: int) -> Dist:
        return self.fetch(self.batch.ticket, self.segment, row, row + 1)[0]


def far_output(under: BatchUnderWay, handle: BatchHandle, fetch: Fetch) -> Output:
    """The result of a batch that has run."""
    done = under.done
    assert done is not None
    parts: list[Logits] = []
    kept = [None if rows is None else tuple(rows) for rows in done.kept]
    for number, size in enumerate(done.sizes):
        rows = under.ahead[number] if number < len(under.ahead) else None
        tokens = done.sampled[number]
        if rows is None or tokens is None:
            parts.append(FarLogits(handle, number, size, fetch))
            continue
        scored = kept[number]
        rows = rows if scored is None else tuple(rows[row] for row in scored)
        parts.append(FarLogits(handle, number, size, fetch, rows, tuple(map(sampled_from_wire, tokens))))
    return Output(tuple(parts), tuple(kept))


def sampled_already(request: SampleRequest) -> tuple[SampledRow, ...] | None:
    """The answer, if it came with the batch."""
    if request.mixture is not None or len(request.branches) != 1:
        return None
    parts = [part for part in request.branches[0] if len(part)]
    if len(parts) != 1 or not isinstance(part := parts[0], FarLogits) or len(part.sampled) != len(request.rows):
        return None
    same = all(a is b for a, b in zip(part.rows, request.rows, strict=True))
    return part.sampled if same else None


def wanted_of(request: SampleRequest) -> Wanted | None:
    """None for rows that are not all at the last stage."""
    branches: list[list[tuple[int, int]]] = []
    for parts in request.branches:
        places: list[tuple[int, int]] = []
        for part in parts:
            if not isinstance(part, FarLogits):
                return None
            if len(part):
                places.append((part.batch.ticket, part.segment))
        branches.append(places)
    mixture: Mixture | None = None if request.mixture is None else mixture_to_wire(request.mixture)
    return Wanted(branches, list(map(row_to_wire, request.rows)), mixture)


def in_parts(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """As few messages as their sizes allow: masks of large vocabularies take tens of kilobytes a row."""
    parts: list[list[Wanted]] = []
    room = 0
    for each in wanted:
        size = sum(map(_size_of, each.rows))
        if not parts or size > room:
            parts.append([])
            room = MAX_MESSAGE_BYTES // 2
        parts[-1].append(each)
        room -= size
    return parts


def _size_of(row: WantedRow) -> int:
    return _ROW_BYTES + len(row.allowed or b"") + len(row.prompt or b"") + 12 * len(row.counts)


def answer_of(request: SampleRequest, rows: Sequence[SampledToken]) -> tuple[SampledRow, ...]:
    """Raises RemoteProtocolError for what cannot be the answer."""
    found = tuple(map(sampled_from_wire, rows))
    mixture = request.mixture
    if mixture is None or not mixture.heads:
        return found
    extra = len(request.rows) - len(mixture.tokens)
    count = len(mixture.tokens)
    return found[:extra] + tuple(
        SampledRow(row.token, row.top, row.branch_probs, row.head, row.branch_heads, _dists(request, count - index))
        for index, row in enumerate(found[extra:])
    )


def _dists(request: SampleRequest, from_end: int) -> Callable[[], tuple[Dist, ...]]:
    def read() -> tuple[Dist, ...]:
        return tuple(_row_from_end(branch, from_end) for branch in request.branches)

    return read


def _row_from_end(parts: Sequence[object], from_end: int) -> Dist:
    left = from_end
    for part in reversed(parts):
        assert isinstance(part, FarLogits)
        if left <= len(part):
            return part.dist(len(part) - left)
        left -= len(part)
    raise IndexError(f"no row {from_end} from the end")
