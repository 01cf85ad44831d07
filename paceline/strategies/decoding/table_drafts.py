"""Drafts of one answer from look-up tables and its own text: as many as pay for themselves, and what their rows teach.

How many follows from measured times and acceptance (`core.drafting.budget`). What the rows of a step teach is learnt
in slices, while the next forward runs (`DrafterFeed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import AdaptiveBudget, OnlineStats
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.strategies.base import Branch, Effect, MachineConfig, WakeAt
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import MAX_LEARNT_ROWS, DrafterFeed, PrefixNode, PrefixTree, TreeDrafter
from paceline.wire.messages import DraftLimits

DRAFTS_PER_ROW: Final = 4  # drafts of one step, by the rows that `DraftLimits` allows a forward
MAX_LATE_TOKENS: Final = 64  # observed before a forward for its drafts; more wait for the next forward
LEARN_DELAY_S: Final = 0.001  # start of the engine's thread, before lessons compete with it for the interpreter


def may_follow(config: MachineConfig, decoder: BranchDecoder, parent: PrefixNode, token: int) -> bool:
    """A draft may be verified: the answer goes on behind it, and its context holds it."""
    position, output = parent.position + 1, config.output
    return position < output.max_tokens and decoder.fits(position) and token not in output.eos_ids


class TableDrafts:
    """What a machine with one forward at a time drafts from tables."""

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        decoder: BranchDecoder,
        *,
        drafter: TreeDrafter | None = None,
        budget: AdaptiveBudget | None = None,
    ) -> None:
        """drafter, budget: in place of its own, for baselines."""
        stats = (config.means.stats or OnlineStats()).budget
        self.budget = budget or AdaptiveBudget(stats, rows=_max_drafts(config.options.drafting))
        self._config, self._tree, self._decoder = config, tree, decoder
        self.feed = DrafterFeed(config, drafter)
        self._admits = partial(may_follow, config, decoder)
        self._step_size = stats.guard.last_step
        self._woken = False  # since the forward under way was asked for
        self._expected = 0.0  # accepted drafts of the forward under way, by the drafter's probabilities
        self._num_drafted = self._num_accepted = 0

    def begin(self, branches: Sequence[Branch]) -> int:
        """Read the prompts. Returns the number of rows at the last one's end to learn from."""
        prompts, targets = [branch.prompt for branch in branches], self._config.seat.targets
        self.feed.begin([*prompts[:-1], (*prompts[-1], *targets)])
        self._decoder.num_top = 0 if self.budget.resting else NUM_SUCCESSORS
        most = min(int(min(self.feed.rows_per_step, MAX_LEARNT_ROWS)), len(prompts[-1]) - 1)
        return self.budget.take_prompt_rows(max(0, most))

    def first_wake(self, now: float) -> list[Effect]:
        """When to learn of the prompts first."""
        return [] if self.budget.resting else [WakeAt(now + LEARN_DELAY_S)]

    # ---- a step -----------------------------------------------------------------------------------------------------
    def walked(self, output: Sequence[int], accepted: int, step: StepSize, *, ends: bool) -> None:
        """These tokens are decided, of which so many were drafted, and the rows that decided them may be learnt from.
        step: of the engine. ends: they are the answer's last."""
        self._step_size = step
        if not self._woken and self.budget.awake:
            self.feed.slice(step.sequences)  # the forward was too short for it
        timed = self._decoder.timed
        if timed is not None:
            self._record_step(accepted, *timed)
        self.feed.append(output)
        self._take_lessons(self._tree.head, timed is None)
        if ends and self.feed.backlog <= MAX_LATE_TOKENS:
            self.feed.finish()  # a short answer has had no step to learn in
        self._woken = False

    def draft(self) -> list[PrefixNode]:
        """New nodes below the head, parents first, that may be worth a row. Call `sent` with those that get one."""
        head = self._tree.head
        max_drafts = self.budget.max_draft_tokens() if self.budget.awake else 0
        if max_drafts == 0 or self.feed.backlog > MAX_LATE_TOKENS:
            return []
        self.feed.catch_up()
        drafted = self.feed.drafter.draft(max_drafts, head.position)
        return self._tree.merge(drafted.first(self.budget.choose(drafted.probs)), self._admits)

    def sent(self, drafts: Sequence[PrefixNode]) -> None:
        """The next forward has these drafts."""
        self._expected = sum(node.score for node in drafts)

    def _record_step(self, accepted: int, own_rows: int, seconds: float) -> None:
        """Record the forward that was answered, for the budget and the report."""
        step = self._step_size if self._step_size.rows else StepSize(own_rows, 1)
        if own_rows == 1:
            self.budget.record(0, 0.0, 0, step, seconds)
            return
        self._num_drafted += own_rows - 1
        self._num_accepted += accepted
        self.budget.record(own_rows - 1, self._expected, accepted, step, seconds)

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
        self._decoder.num_top = 0
        if self.budget.resting:
            feed.rest(sequences)
            return
        new_rows = feed.new_rows(sequences, paused=self.budget.paused)
        feed.teach(feed.prompt_lessons(*prompt, sequences))
        feed.teach(feed.row_lessons(rows, head, self._decoder.mixer.plain, new_rows))
        if self.budget.awake and feed.may_learn(feed.new_rows(sequences, paused=self.budget.paused)):
            self._decoder.num_top = NUM_SUCCESSORS

    def stats(self) -> dict[str, float]:
        drafts = {"drafted": float(self._num_drafted), "accepted": float(self._num_accepted)}
        return drafts | self.budget.stats()


def _max_drafts(drafting: DraftLimits) -> int:
    """Drafts in one step at most: 64 by default, none where nothing is to be drafted ahead."""
    return DRAFTS_PER_ROW * drafting.rows if drafting.ahead else 0
