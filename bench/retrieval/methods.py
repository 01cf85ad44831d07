"""Which documents go into which prompt on which side: the centralised and the concatenating ways beside ours, as plans.

The parts that benches share (issue names after DRAGON, 7.2): CRCG reads one side's documents in one context, DRCG both
sides' documents in one context, ours one document a branch on the side that holds it. All start from the same retrieved
documents. A plan is data: `perplexity` scores a text under it, others may time or serve it. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.aggregation.weights import log_weight, mix, mix_weighted, side_weights
from paceline.core.sampling.dist import Dist
from paceline.core.side import SIDES, Side

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """A document as one side has found it."""

    side: Side
    ids: Ids
    score: float  # R, the log weight of its branch


@dataclass(frozen=True, slots=True)
class Context:
    """What one sequence reads before the query, on which side, and R of its document: None where it reads none."""

    side: Side
    ids: Ids
    score: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Contexts of one method; `fetched` are tokens of documents that must cross the link before the first forward.

    rescored: R follows the text, by `evidence`, instead of being that of the query for good.
    """

    method: str
    contexts: tuple[Context, ...]
    fetched: int = 0
    rescored: bool = False


Found = Mapping[Side, Sequence[Retrieved]]  # best first
Method = Callable[[Found, Ids, int], Plan]  # of what was found, the separator's ids, tokens in one context


def no_retrieval(found: Found, separator: Ids, budget: int) -> Plan:  # noqa: ARG001  # as every method
    return Plan("none", (Context("device", (), None),))


def device_only(found: Found, separator: Ids, budget: int) -> Plan:
    """CRCG on the device."""
    return Plan("crcg_device", (_joined("device", found.get("device", ()), separator, budget),))


def cloud_only(found: Found, separator: Ids, budget: int) -> Plan:
    """CRCG on the cloud."""
    return Plan("crcg_cloud", (_joined("cloud", found.get("cloud", ()), separator, budget),))


def concatenation(found: Found, separator: Ids, budget: int, reader: Side = "device") -> Plan:
    """DRCG: documents of both sides in one context on `reader`, which must fetch those that the other side holds."""
    every = [document for side in SIDES for document in found.get(side, ())]
    kept = fitting(every, separator, budget)
    fetched = sum(len(document.ids) for document in kept if document.side != reader)
    return Plan("drcg", (_joined(reader, every, separator, budget),), fetched)


def branches(found: Found, separator: Ids, budget: int) -> Plan:
    """As served: each document is a context of its own, cropped to the same budget, on the side that holds it."""
    every = [document for side in SIDES for document in found.get(side, ())]
    if not every:
        return Plan("ours", no_retrieval(found, separator, budget).contexts)
    contexts = tuple(_joined(document.side, (document,), separator, budget) for document in every)
    return Plan("ours", contexts, rescored=True)


def fixed_branches(found: Found, separator: Ids, budget: int) -> Plan:
    """Ours with R of the query alone, as `"rescoring": false` has it."""
    return replace(branches(found, separator, budget), method="fixed", rescored=False)


METHODS: tuple[Method, ...] = (no_retrieval, device_only, cloud_only, concatenation, branches, fixed_branches)


def fitting(documents: Sequence[Retrieved], separator: Ids, budget: int) -> list[Retrieved]:
    """The best of the documents that `budget` tokens hold with a separator after each; the last may be cropped."""
    kept: list[Retrieved] = []
    room = budget
    for document in sorted(documents, key=lambda each: -each.score):
        size = min(len(document.ids), room - len(separator))
        if size <= 0:
            break
        kept.append(Retrieved(document.side, document.ids[:size], document.score))
        room -= size + len(separator)
    return kept


def _joined(side: Side, documents: Sequence[Retrieved], separator: Ids, budget: int) -> Context:
    """One context of several documents: the best stands last, next to the query. Its R is their mean."""
    kept = fitting(documents, separator, budget)
    if not kept:
        return Context(side, (), None)
    ids: Ids = ()
    for document in reversed(kept):
        ids += document.ids + separator
    return Context(side, ids, sum(document.score for document in kept) / len(kept))


def mixture(contexts: Sequence[Context], dists: Sequence[Dist]) -> Dist:
    """What a plan says of one position, given what each context says: within each side, then over sides.

    DRAGON eq. 2 and 4, by the program's own functions. A side without a document weighs nothing beside one with.
    """
    by_side: dict[Side, Dist] = {}
    log_h: dict[Side, float | None] = {}
    for side in SIDES:
        mine = [(context.score, dist) for context, dist in zip(contexts, dists, strict=True) if context.side == side]
        if not mine:
            continue
        scores = [score for score, _ in mine if score is not None]
        if scores and len(scores) < len(mine):
            raise ValueError(f"on the {side} some contexts have a document and some have none")
        log_h[side] = log_weight(scores) if scores else None
        by_side[side] = mix([dist for _, dist in mine], scores or [0.0] * len(mine))
    weights = side_weights(log_h)
    return mix_weighted(list(by_side.values()), [weights[side] for side in by_side])
