"""Drafts of one answer from look-up tables and its own text: as many as pay for themselves, and what their rows teach.

How many follows from measured times and acceptance (`core.drafting.budget`). What the rows of a step teach is learnt
in slices, while the next forward runs (`DrafterFeed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import AdaptiveBudget, OnlineStats, OtherDrafts
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.drafting.ngram_drafter import Candidates, Context, DraftTree, NgramDrafter, grow_tree
from paceline.strategies.base import Branch, Effect, MachineConfig, WakeAt
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import (
    MAX_LATE_TOKENS,
    MAX_LEARNT_ROWS,
    DrafterFeed,
    PrefixNode,
    PrefixTree,
)

DRAFTS_PER_ROW: Final = 4  # drafts of one step, by the rows that `DraftLimits` allows a forward
LEARN_DELAY_S: Final = 0.001  # start of the engine's thread, before lessons compete with it for the interpreter


def may_follow(config: MachineConfig, decoder: BranchDecoder, parent: PrefixNode, token: int) -> bool:
    """A draft may be verified: the answer goes on behind it, and its context holds it."""
    position, output = parent.position + 1, config.output
    return position < output.max_tokens and decoder.fits(position) and token not in output.eos_ids


class Guess(NamedTuple):
    """A draft of another source, and how likely the target is it, or its second guess."""

    token: int
    prob: float
    second: int | None = None
    second_prob: float = 0.0


class BesideChain:
    """Tables' drafts around a chain of another source's, as one `DraftSource`. A context is the tables', with the
    number of guesses that lead to it; None beside the chain."""

    def __init__(self, drafter: NgramDrafter, chain: Sequence[Guess]) -> None:
        self._drafter, self._chain = drafter, chain

    def children(self, context: tuple[Context, int | None]) -> Candidates:
        at, place = context
        tables = self._drafter.children(at)
        if place is None or place >= len(self._chain):
            return tables
        guess, known = self._chain[place], dict(tables)
        found = {guess.token: max(guess.prob, known.get(guess.token, 0.0))}
        if guess.second is not None:
            found[guess.second] = max(guess.second_prob, known.get(guess.second, 0.0))
        left = max(0.0, 1.0 - sum(found.values())) / max(1e-6, 1.0 - sum(known.get(token, 0.0) for token in found))
        others = [(token, prob * min(1.0, left)) for token, prob in tables if token not in found]
        return [*found.items(), *others]

    def child(self, context: tuple[Context, int | None], token: int) -> tuple[Context, int | None]:
        at, place = context
        follows = place is not None and place < len(self._chain) and self._chain[place].token == token
        return self._drafter.child(at, token), place + 1 if place is not None and follows else None


class TableDrafts:
    """What a machine with one forward at a time drafts from tables."""

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        decoder: BranchDecoder,
        *,
        feed: DrafterFeed | None = None,
        budget: AdaptiveBudget | None = None,
    ) -> None:
        """feed: of a drafter that the caller asks. budget: in place of its own, for baselines."""
        stats, drafting = (config.means.stats or OnlineStats()).budget, config.options.drafting
        most = DRAFTS_PER_ROW * drafting.rows if drafting.ahead else 0  # in one step: 64 by default
        self.budget = budget or AdaptiveBudget(stats, rows=most)
        self._config, self._tree, self._decoder = config, tree, decoder
        self.feed = feed or DrafterFeed(config)
        self._admits = partial(may_follow, config, decoder)
        self._step_size = stats.guard.last_step
        self._most: int | None = None  # drafts of the next forward, once that is known
        self._waited = 0.0  # s, before the forward under way was asked for, for drafts
        self._woken = False  # since the forward under way was asked for
        self._sent, self._expected = 0, 0.0  # drafts of the forward under way; accepted ones by their probabilities
        self._num_drafted = self._num_accepted = 0

    def begin(self, branches: Sequence[Branch]) -> int:
        """Read the prompts. Returns the number of rows at the last one's end to learn from."""
        self.feed.begin(branches, self._config.seat.targets)
        self._decoder.num_top = self._config.output.num_top if self.budget.resting else NUM_SUCCESSORS
        most = min(int(min(self.feed.rows_per_step, MAX_LEARNT_ROWS)), len(branches[-1].prompt) - 1)
        return self.budget.take_prompt_rows(max(0, most))

    def first_wake(self, now: float) -> list[Effect]:
        """When to learn of the prompts first."""
        return [] if self.budget.resting else [WakeAt(now + LEARN_DELAY_S)]

    # ---- a step -----------------------------------------------------------------------------------------------------
    def walked(
        self,
        output: Sequence[int],
        accepted: int,
        step: StepSize,
        *,
        ends: bool,
        others: int = 0,
        usual: bool = True,
    ) -> None:
        """These tokens are decided, of which so many were drafted, and the rows that decided them may be learnt from.
        step: of the engine. ends: they are the answer's last. others: of them, that another source has drafted. usual:
        the step's time tells something of other steps."""
        self._step_size = step
        if not self._woken and self.budget.awake:
            self.feed.slice(step.sequences)  # the forward was too short for it
        timed = self._decoder.timed
        if timed is not None and usual:
            self._record_step(accepted, others, *timed)
        self.feed.append(output)
        self._take_lessons(self._tree.head, timed is None)
        if ends and self.feed.backlog <= MAX_LATE_TOKENS:
            self.feed.finish()  # a short answer has had no step to learn in
        self._woken, self._most = False, None

    @property
    def most(self) -> int:
        """Drafts of the next forward at most."""
        if self._most is None:
            self._most = self.budget.max_draft_tokens() if self.budget.awake else 0
        return self._most

    def worth(self, chain: Sequence[Guess], nodes: Sequence[PrefixNode]) -> list[PrefixNode]:
        """Those of another source's nodes, the chain's and second guesses, that pay by themselves; parents first."""
        head, above = self._tree.head, 1.0
        probs: dict[PrefixNode, float] = {}
        node = head
        for guess in chain:
            if guess.second in node.children:
                probs[node.children[guess.second]] = above * guess.second_prob
            above *= guess.prob
            node = node.children[guess.token]
            probs[node] = above
        best = sorted((node for node in nodes if node in probs), key=lambda node: -probs[node])
        return best[: self.budget.worth([probs[node] for node in best])]

    def draft(self, chain: Sequence[Guess] = (), rows: int = 0) -> list[PrefixNode]:
        """New nodes below the head, parents first, that may be worth a row. Call `sent` with those that get one.

        chain: of another source, whose nodes are in the tree and get so many rows in any case.
        """
        head = self._tree.head
        self.budget.beside = OtherDrafts(rows, sum(accumulate((guess.prob for guess in chain), mul)))
        max_drafts = self.most
        if not (max_drafts and self.feed.is_current):
            return []
        if not chain:
            return self.take(self.feed.drafter.draft(max_drafts, head.position))
        drafter = self.feed.drafter
        assert isinstance(drafter, NgramDrafter), "no other one drafts beside a chain"
        drafted = grow_tree(BesideChain(drafter, chain), (drafter.root(head.position), 0), max_drafts + rows)
        own = [index for index, known in enumerate(self._are_there(drafted)) if not known][:max_drafts]
        count = self.budget.choose([drafted.probs[index] for index in own])
        return self._tree.merge(drafted.first(own[count - 1] + 1 if count else 0), self._admits)

    def _are_there(self, drafted: DraftTree) -> list[bool]:
        """Of each node of a tree below the head: it is in the tree already."""
        place: dict[int, PrefixNode | None] = {-1: self._tree.head}
        for index, (token, parent) in enumerate(zip(drafted.tokens, drafted.parents, strict=True)):
            above = place[parent]
            place[index] = None if above is None else above.children.get(token)
        return [place[index] is not None for index in range(len(drafted))]

    def take(self, drafted: DraftTree) -> list[PrefixNode]:
        """As `draft`, of a tree that was drafted elsewhere, of `most` nodes."""
        return self._tree.merge(drafted.first(self.budget.choose(drafted.probs)), self._admits)

    def sent(self, drafts: Sequence[PrefixNode], waited: float = 0.0) -> None:
        """The next forward has these drafts, for which it has waited so many s."""
        self._sent, self._expected = len(drafts), sum(node.score for node in drafts)
        self._waited = waited

    def _record_step(self, accepted: int, others: int, own_rows: int, seconds: float) -> None:
        """Record the forward that was answered, for the budget and the report."""
        step = self._step_size if self._step_size.rows else StepSize(own_rows, 1)
        if not self._sent:
            self.budget.record(0, 0.0, 0, step, seconds, waited=self._waited)
            return
        self._num_drafted += self._sent
        self._num_accepted += accepted
        self.budget.record(self._sent, self._expected, accepted, step, seconds, waited=self._waited, others=others)

    # ---- while a forward runs ---------------------------------------------------------------------------------------
    @property
    def is_due(self) -> bool:
        """There is something to learn while the next forward runs."""
        return self.budget.awake and self.feed.is_due

    def learn(self) -> bool:
        """Learn a slice of what waits; True if more is to be learnt at once."""
        self._woken = True
        if self.budget.resting:
            return False
        is_left = self.feed.slice(self._step_size.sequences)
        return is_left and (self.budget.awake or self._decoder.timed is None)

    def _take_lessons(self, head: PrefixNode, prefilled: bool) -> None:
        """Keep what the rows answered last teach, and ask for the heads of the next ones if they are to be learnt."""
        rows = self._decoder.pop_branch_dists()  # in any case: distributions are large
        prompt = self._decoder.prompt_dists() if prefilled else ((), ())
        feed, sequences = self.feed, self._step_size.sequences
        self._decoder.num_top = self._config.output.num_top
        if self.budget.resting:
            feed.rest(sequences)
            return
        feed.teach(feed.prompt_lessons(*prompt, sequences))
        goes_on = feed.take_rows(rows, head, self._decoder.mixer.plain, sequences, paused=self.budget.paused)
        if self.budget.awake and goes_on:
            self._decoder.num_top = NUM_SUCCESSORS

    def stats(self) -> dict[str, float]:
        drafts = {"drafted": float(self._num_drafted), "accepted": float(self._num_accepted)}
        return drafts | self.budget.stats()
