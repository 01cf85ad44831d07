"""Assignment of retrieved documents to prompts and sides: the centralised and concatenating methods, and ours.

Names after DRAGON, 7.2: CRCG reads one side's documents in one context, DRCG both sides' documents in one context, ours
one document per branch on the side that holds it. All start from the same retrieved documents. A plan is data:
`perplexity` scores a text under it. Knows no model.
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
    """A document retrieved on one side."""

    side: Side
    ids: Ids
    score: float  # R, the log weight of its branch


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens before the query in one sequence, its side, and R of its document (None without a document)."""

    side: Side
    ids: Ids
    score: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Contexts of one method. fetched: document tokens that must cross the link before the first forward.

    rescored: R is updated with the evidence of the text, instead of staying that of the query.
    """

    method: str
    contexts: tuple[Context, ...]
    fetched: int = 0
    rescored: bool = False


Found = Mapping[Side, Sequence[Retrieved]]  # best first
Method = Callable[[Found, Ids, int], Plan]  # (documents, separator ids, maximum tokens of a context)


def no_retrieval(found: Found, separator: Ids, budget: int) -> Plan:  # noqa: ARG001  # common signature
    return Plan("none", (Context("device", (), None),))


def device_only(found: Found, separator: Ids, budget: int) -> Plan:
    """CRCG on the device."""
    return Plan("crcg_device", (_joined("device", found.get("device", ()), separator, budget),))


def cloud_only(found: Found, separator: Ids, budget: int) -> Plan:
    """CRCG on the cloud."""
    return Plan("crcg_cloud", (_joined("cloud", found.get("cloud", ()), separator, budget),))


def concatenation(found: Found, separator: Ids, budget: int, reader: Side = "device") -> Plan:
    """DRCG: documents of both sides in one context on `reader`, which must fetch those of the other side."""
    documents = [document for side in SIDES for document in found.get(side, ())]
    kept = fitting(documents, separator, budget)
    fetched = sum(len(document.ids) for document in kept if document.side != reader)
    return Plan("drcg", (_joined(reader, documents, separator, budget),), fetched)


def branches(found: Found, separator: Ids, budget: int) -> Plan:
    """Ours, as served: one context per document, cropped to the same budget, on the side that holds it."""
    documents = [document for side in SIDES for document in found.get(side, ())]
    if not documents:
        return Plan("ours", no_retrieval(found, separator, budget).contexts)
    contexts = tuple(_joined(document.side, (document,), separator, budget) for document in documents)
    return Plan("ours", contexts, rescored=True)


def fixed_branches(found: Found, separator: Ids, budget: int) -> Plan:
    """Ours with R fixed by the query, as with `"rescoring": false`."""
    return replace(branches(found, separator, budget), method="fixed", rescored=False)


METHODS: tuple[Method, ...] = (no_retrieval, device_only, cloud_only, concatenation, branches, fixed_branches)


def fitting(documents: Sequence[Retrieved], separator: Ids, budget: int) -> list[Retrieved]:
    """The best documents that fit in `budget` tokens with a separator after each; the last may be cropped."""
    kept: list[Retrieved] = []
    remaining = budget
    for document in sorted(documents, key=lambda each: -each.score):
        size = min(len(document.ids), remaining - len(separator))
        if size <= 0:
            break
        kept.append(Retrieved(document.side, document.ids[:size], document.score))
        remaining -= size + len(separator)
    return kept


def _joined(side: Side, documents: Sequence[Retrieved], separator: Ids, budget: int) -> Context:
    """One context of several documents, the best one last, next to the query. Its R is their mean."""
    kept = fitting(documents, separator, budget)
    if not kept:
        return Context(side, (), None)
    ids: Ids = ()
    for document in reversed(kept):
        ids += document.ids + separator
    return Context(side, ids, sum(document.score for document in kept) / len(kept))


def mixture(contexts: Sequence[Context], dists: Sequence[Dist]) -> Dist:
    """A plan's distribution at one position, mixed from those of its contexts within each side, then over sides.

    DRAGON eq. 2 and 4, by the program's own functions. A side without a document has weight 0 if the other has one.
    """
    by_side: dict[Side, Dist] = {}
    log_evidence: dict[Side, float | None] = {}
    for side in SIDES:
        own = [(context.score, dist) for context, dist in zip(contexts, dists, strict=True) if context.side == side]
        if not own:
            continue
        scores = [score for score, _ in own if score is not None]
        if scores and len(scores) < len(own):
            raise ValueError(f"on the {side} some contexts have a document and some have none")
        log_evidence[side] = log_weight(scores) if scores else None
        by_side[side] = mix([dist for _, dist in own], scores or [0.0] * len(own))
    weights = side_weights(log_evidence)
    return mix_weighted(list(by_side.values()), [weights[side] for side in by_side])
