"""`lookup_tree` (DIAA): one side drafts a tree without a draft model and verifies it in one forward.

Drafts come from tables of what the model predicted after each token, and from repetitions of the text
(`core.drafting.ngram_drafter`). The number of drafts follows from measured times and acceptance
(`core.drafting.budget`). The tables learn from a step's rows while the next forward runs.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import AdaptiveBudget, OnlineStats
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.strategies.base import Branch, Effect, FinishReason, MachineConfig, Strategy, WakeAt
from paceline.strategies.decoding.prefix_tree import MAX_LEARNT_ROWS, DrafterFeed, PrefixNode, TreeDrafter
from paceline.strategies.solo import LEARN_DELAY_S, Solo, may_follow
from paceline.wire.messages import DraftLimits

DRAFTS_PER_ROW: Final = 4  # drafts of one step, by the rows that `DraftLimits` allows a forward
MAX_LATE_TOKENS: Final = 64  # observed before a forward for its drafts; more wait for the next forward


class LookupTree(Solo):
    """One forward at a time, with as many drafts as the budget chooses."""

    drafts = True

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        budget: AdaptiveBudget | None = None,
    ) -> None:
        """drafter, budget: in place of its own, for baselines."""
        super().__init__(config)
        stats = (config.means.stats or OnlineStats()).budget
        self._budget = budget or AdaptiveBudget(stats, rows=_max_drafts(config.options.drafting))
        self._feed = DrafterFeed(config, drafter)
        self._woken = False  # since the forward under way was asked for
        self._expected = 0.0  # accepted drafts of the forward under way, by the drafter's probabilities
        self._step_size = stats.guard.last_step
        self._num_drafted = self._num_accepted = 0

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        targets, resting = self._config.seat.targets, self._budget.resting
        prompts = [branch.prompt for branch in branches]
        self._feed.begin([*prompts[:-1], (*prompts[-1], *targets)])
        self._decoder.num_top = 0 if resting else NUM_SUCCESSORS
        most = min(int(min(self._feed.rows_per_step, MAX_LEARNT_ROWS)), len(prompts[-1]) - 1)
        num_dists = self._budget.take_prompt_rows(max(0, most))
        effects = self._decoder.start(branches, targets, self._tree.head, max_new_tokens, num_prompt_dists=num_dists)
        return effects if resting else [*effects, WakeAt(self._now + LEARN_DELAY_S)]

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:
        if not self._woken and self._budget.awake:
            self._feed.slice(self._step_size.sequences)  # the forward was too short for it
        timed = self._decoder.timed
        if timed is not None:
            self._record_step(len(output) - (reason != "stop"), *timed)
        self._feed.append(output)
        self._take_lessons(self._tree.head, timed is None)
        if reason is not None and self._feed.backlog <= MAX_LATE_TOKENS:
            self._feed.finish()  # a short answer has had no step to learn in
        self._woken = False

    def _next_segment(self) -> list[PrefixNode]:
        head = self._tree.head
        max_drafts = self._budget.max_draft_tokens() if self._budget.awake else 0
        if max_drafts == 0 or self._feed.backlog > MAX_LATE_TOKENS:
            return [head]
        self._feed.catch_up()
        drafted = self._feed.drafter.draft(max_drafts, head.position)
        drafted = drafted.first(self._budget.choose(drafted.probs))
        drafts = self._admitted(self._tree.merge(drafted, partial(may_follow, self._config, self._decoder)))
        self._expected = sum(node.score for node in drafts)
        return [head, *drafts]

    def _record_step(self, accepted: int, own_rows: int, seconds: float) -> None:
        """Record the forward that was answered, for the budget and the report."""
        step = self._step_size if self._step_size.rows else StepSize(own_rows, 1)
        if own_rows == 1:
            self._budget.record(0, 0.0, 0, step, seconds)
            return
        self._num_drafted += own_rows - 1
        self._num_accepted += accepted
        self._budget.record(own_rows - 1, self._expected, accepted, step, seconds)

    # ---- while a forward runs ---------------------------------------------------------------------------------------
    @property
    def _is_due(self) -> bool:
        return self._budget.awake and self._feed.is_due

    def _wake(self) -> list[Effect]:
        """Learn a slice of what waits."""
        self._woken = True
        if self._budget.resting:
            return []
        is_left = self._feed.slice(self._step_size.sequences)
        goes_on = is_left and (self._budget.awake or self._decoder.timed is None)
        return [WakeAt(self._now)] if goes_on else []

    def _take_lessons(self, head: PrefixNode, prefilled: bool) -> None:
        """Keep what the rows answered last teach, and ask for the heads of the next ones if they are to be learnt."""
        rows = self._decoder.pop_branch_dists()  # in any case: distributions are large
        prompt = self._decoder.prompt_dists() if prefilled else ((), ())
        feed, sequences = self._feed, self._step_size.sequences
        self._decoder.num_top = 0
        if self._budget.resting:
            feed.rest(sequences)
            return
        new_rows = feed.new_rows(sequences, paused=self._budget.paused)
        feed.teach(feed.prompt_lessons(*prompt, sequences))
        feed.teach(feed.row_lessons(rows, head, self._decoder.mixer.plain, new_rows))
        if self._budget.awake and feed.may_learn(feed.new_rows(sequences, paused=self._budget.paused)):
            self._decoder.num_top = NUM_SUCCESSORS

    def _stats(self) -> dict[str, float]:
        stats = {
            "forwards": float(self._decoder.forwards),
            "rows": float(self._decoder.rows),
            "drafted": float(self._num_drafted),
            "accepted": float(self._num_accepted),
        }
        return stats | self._budget.stats()


def _max_drafts(drafting: DraftLimits) -> int:
    """Drafts in one step at most: 64 by default, none where nothing is to be drafted ahead."""
    return DRAFTS_PER_ROW * drafting.rows if drafting.ahead else 0


lookup_tree = Strategy(
    name="lookup_tree",
    machine=LookupTree,
    participants="one side",
    text_of="front",
)
