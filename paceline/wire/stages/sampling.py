"""What is asked of rows at the last stage, and what was sampled there: no row of the vocabulary crosses the wire.

Values of `core` are sent as they are: maps by the names of their fields, arrays as bytes (`wire.codec`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, get_args, get_origin

import msgspec
import numpy as np

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow
from paceline.wire.messages import Count, SentPart
from paceline.wire.stages.messages import MAX_ROWS, Kept, Number, Numbered, RowIndices, Sentence, StageFrame

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
