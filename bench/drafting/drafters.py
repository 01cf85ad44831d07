"""Drafting methods that `lookup_tree` is compared with. Their drafts are all verified by the strategy's machine.

Each follows its authors' description: prompt look-up (Saxena 2023), a suffix automaton alone (Hu et al. 2025), token
recycling with its tree of 80 nodes (Luo et al. 2025) and a chain of a smaller model (Leviathan et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lab.baselines.lookup import (
    AS_PUBLISHED,
    PAPER,
    DrafterOptions,
    FixedBudget,
    LessonsFirst,
    VariedDrafter,
    levelled_shape,
    static_shape,
)
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.drafting.ngram_drafter import NO_DRAFT, DraftTree
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine
from paceline.strategies.base import Machine, MachineConfig
from paceline.strategies.decoding.prefix_tree import TreeDrafter
from paceline.strategies.lookup_tree import LookupTree
from paceline.strategies.solo import Solo

PLAIN: Final = "plain"
OURS: Final = "lookup_tree"
RECYCLING: Final = 80  # nodes
NGRAM: Final = 3  # longest match of prompt look-up, in tokens
COPIED: Final = 10  # tokens that prompt look-up drafts
MAX_AUTOMATON: Final = 60
MODEL_DRAFTS: Final = 5


def _chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (1.0,) * len(tokens))


@dataclass(slots=True)
class PromptLookup:
    """Draft the continuation of an earlier occurrence of the last few tokens: the longest match, then the earliest."""

    text: list[int] = field(default_factory=list)

    def read(self, tokens: Iterable[int]) -> None:
        self.text += tokens

    def observe(self, token: int) -> None:
        self.text.append(token)

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """No effect."""

    def draft(self, budget: int, position: int) -> DraftTree:  # noqa: ARG002  # interface of `TreeDrafter`
        text = self.text
        for size in range(min(NGRAM, len(text) - 1), 0, -1):
            ending, first = text[-size:], text[-size]
            for at in range(len(text) - size):
                if text[at] == first and text[at : at + size] == ending:
                    return _chain(text[at + size : at + size + min(COPIED, budget)])
        return NO_DRAFT


class AutomatonAlone(VariedDrafter):
    """Draft the chain after the longest suffix that occurred before: four tokens per matched token."""

    def draft(self, budget: int, position: int) -> DraftTree:  # noqa: ARG002  # interface of `TreeDrafter`
        automaton, match, tokens = self._automaton, self._automaton.match, list[int]()
        most = min(budget, MAX_AUTOMATON, 4 * match.length)
        while len(tokens) < most and (found := automaton.continuations(match)):
            tokens.append(found[0][0])
            match = automaton.advance(match, found[0][0])
        return _chain(tokens)


class Recycling(VariedDrafter):
    """A token's table row is its latest distribution, also that of a rejected draft."""

    def learn(
        self,
        token: int,
        dist: Dist,
        *,
        before: int | None = None,
        accepted: bool = True,  # noqa: ARG002  # interface of `TreeDrafter`
    ) -> None:
        super().learn(token, dist, before=before, accepted=True)


class ModelDrafter:
    """Draft greedily with a smaller model of the same vocabulary, on the caller's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._text: list[int] = []
        self._cached = 0

    def read(self, tokens: Iterable[int]) -> None:
        self._text += tokens

    def observe(self, token: int) -> None:
        self._text.append(token)

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """No effect."""

    def draft(self, budget: int, position: int) -> DraftTree:
        seq = SeqId(1)
        if position <= 1:
            self._engine.release(seq)
            self._cached = 0
        rows = tuple(self._text[self._cached :])
        drafts: list[int] = []
        while len(drafts) < min(budget, MODEL_DRAFTS):
            start = self._engine.length(seq)
            drafts.append(self._engine.forward(Batch((Segment(seq, start, rows),))).dists[0][-1].argmax())
            rows = (drafts[-1],)
        self._cached = len(self._text)
        self._engine.truncate(seq, self._cached)
        return _chain(drafts)


@dataclass(slots=True)
class DraftMemory:
    """State of one drafting method that persists from answer to answer."""

    vocab_size: int
    table: LookupTable = field(init=False)
    stats: OnlineStats = field(default_factory=OnlineStats)

    def __post_init__(self) -> None:
        self.table = LookupTable(self.vocab_size)


Way = Callable[[MachineConfig, DraftMemory], Machine]


def _drafting(options: DrafterOptions, budget: int | None = None, kind: type[VariedDrafter] = VariedDrafter) -> Way:
    """budget: draft tokens in every step; None: adaptive."""

    def make(config: MachineConfig, memory: DraftMemory) -> Machine:
        output, stats = config.output, memory.stats.drafter
        drafter = kind(memory.table, output.sampling, eos_ids=output.eos_ids, stats=stats, options=options)
        return LookupTree(config, drafter=drafter, budget=None if budget is None else FixedBudget(budget))

    return make


def _with(drafter: Callable[[], TreeDrafter], budget: int) -> Way:
    return lambda config, _: LookupTree(config, drafter=drafter(), budget=FixedBudget(budget))


def ways(draft_model: Engine | None) -> dict[str, Way]:
    """Drafting methods by name, plain decoding first."""
    recycling = replace(AS_PUBLISHED, noise=False, shape=levelled_shape())
    by_name: dict[str, Way] = {
        PLAIN: lambda config, _: Solo(config),
        "prompt look-up": _with(PromptLookup, COPIED),
        "suffix automaton": _drafting(DrafterOptions(tables=False), MAX_AUTOMATON, AutomatonAlone),
        "token recycling": _drafting(recycling, RECYCLING, Recycling),
    }
    # The same drafters under the budget by which ours chooses its own number of drafts, guard included.
    by_name["suffix automaton, our budget"] = _drafting(DrafterOptions(tables=False), None, AutomatonAlone)
    by_name["token recycling, our budget"] = _drafting(recycling, None, Recycling)
    if draft_model is not None:
        by_name["draft model"] = _with(lambda: ModelDrafter(draft_model), MODEL_DRAFTS)
    return by_name | {
        OURS: lambda config, _: LookupTree(config),
        "without tables": _drafting(DrafterOptions(tables=False)),
        "without dynamic tree": _drafting(DrafterOptions(shape=static_shape(64))),
        "without overlap": lambda config, _: LessonsFirst(config),
    }


def sized(budget: int) -> dict[str, Way]:
    """The same drafter with a dynamic tree, with a dynamic tree by the paper's scores, and with a static tree."""
    return {
        "dynamic": _drafting(DrafterOptions(), budget),
        "paper's scores": _drafting(replace(AS_PUBLISHED, scoring=PAPER), budget),
        "static": _drafting(DrafterOptions(shape=static_shape(budget)), budget),
    }
