"""Answers to forward requests that have run: rows sampled in one pass of a step, or their distributions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.core.batching.scheduler import ScheduledSegment
from paceline.core.batching.segment import Segment
from paceline.core.sampling.row import RowSampling, RowTree
from paceline.engine.base import Logits, SampleRequest, SequenceEngine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.requests import Answer, ForwardRequest, Rows

log = logging.getLogger("paceline.engine")

Answered = tuple[Answer, Rows | EngineError]
Answers = list[Answered]
Done = tuple[Answer, SampleRequest | tuple[Logits, ...] | EngineError]  # what to answer: sampled, or distributions


def done_of(request: ForwardRequest, parts: tuple[Logits, ...]) -> list[Done]:
    """What to answer to a request that has run; nothing while other branches of its join have not.

    parts: results of its chunks, in order.
    """
    if request.join is not None:
        if request.scored is not None:
            return [(request.answer, EngineError("rows of a mixture were pruned while they were computed"))]
        joined = request.join.add(request.branch, parts)
        return [] if joined is None else [(request.join.answer, joined)]
    if request.sampling is None or not parts:
        return [(request.answer, parts)]
    sampling = request.sampling
    if request.scored is not None:
        sampling = tuple(sampling[row] for row in request.scored)
    rows = sampling[-sum(map(len, parts)) :]  # rows of a cached prefix are not computed
    tree = _tree_of(request.segment) if request.path_only and request.scored is None else None
    return [(request.answer, SampleRequest((parts,), rows, tree=tree))]


def _tree_of(segment: Segment) -> RowTree | None:
    if segment.parents is None:
        return None
    row_of = {name: row for row, name in enumerate(segment.node_ids)}
    return RowTree(tuple(row_of.get(parent, -1) for parent in segment.parents), segment.tokens)


def rows_ahead(request: ForwardRequest | None, chunk: ScheduledSegment) -> tuple[RowSampling, ...] | None:
    """How the wanted rows of a chunk will be sampled; None: not alone, or not at all."""
    if request is None or request.sampling is None or request.join is not None or not chunk.final:
        return None
    count = len(chunk.segment.logits_rows())
    return request.sampling[-count:] if 0 < count <= len(request.sampling) else None


def answers_of(engine: SequenceEngine, done: Sequence[Done]) -> Answers:
    """Rows of the forwards that are complete: sampled in one pass, or as distributions."""
    rows = iter(_sample(engine, [wanted for _, wanted in done if isinstance(wanted, SampleRequest)]))
    answers: Answers = []
    for answer, wanted in done:
        if isinstance(wanted, SampleRequest):
            answers.append((answer, next(rows)))
        else:
            answers.append((answer, wanted if isinstance(wanted, EngineError) else _dists(wanted)))
    return answers


def _sample(engine: SequenceEngine, requests: Sequence[SampleRequest]) -> Sequence[Rows | EngineError]:
    """A fault, such as logits that are not numbers, fails its own request only."""
    try:
        return engine.sample(requests) if requests else ()
    except Exception as fault:
        if len(requests) > 1:
            return [found for request in requests for found in _sample(engine, [request])]
        log.exception("rows could not be sampled")
        return [EngineError(f"the model's scores are unusable: {fault}")]


def _dists(parts: tuple[Logits, ...]) -> Rows | EngineError:
    try:
        return tuple(dist for part in parts for dist in part.dists())
    except Exception as fault:  # a GPU reports late what went wrong in the forward
        log.exception("distributions could not be read")
        return EngineError(f"the model's scores are unusable: {fault}")
