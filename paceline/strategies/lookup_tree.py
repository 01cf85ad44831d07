"""`lookup_tree` (DIAA): one side drafts a tree and verifies it in one forward.

Drafts come from tables of what the model predicted after each token, from repetitions of the text
(`core.drafting.ngram_drafter`), and from a draft model where there is one (`strategies.drafting`). How many, and what
tables learn, is `decoding.table_drafts`.
"""

from __future__ import annotations

from typing import Final

from paceline.core.drafting.budget import AdaptiveBudget
from paceline.strategies.base import Branch, Effect, FinishReason, MachineConfig, Strategy, WakeAt
from paceline.strategies.decoding.prefix_tree import PrefixNode, TreeDrafter
from paceline.strategies.decoding.table_drafts import TableDrafts
from paceline.strategies.drafting import AnswerDrafter, DraftingSolo

AHEAD: Final = 32  # nodes that a draft model drafts beyond what is under way


class LookupTree(DraftingSolo):
    """One forward at a time, with as many drafts as the budget chooses."""

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        budget: AdaptiveBudget | None = None,
    ) -> None:
        """drafter, budget: in place of its own, for baselines."""
        super().__init__(config, AnswerDrafter(config, drafter))
        self._tables = TableDrafts(config, self._tree, self._decoder, feed=self._drafter.feed, budget=budget)
        self._answered = 0.0  # s, when the last forward was
        self._trials = self._drafter.model_stats.trials  # of a draft model, until then

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        targets, rows = self._config.seat.targets, self._tables.begin(branches)
        self._decoder.goes_on = self._goes_on if self._tables.budget.resting else None
        effects = self._decoder.start(branches, targets, self._tree.head, max_new_tokens, num_prompt_dists=rows)
        if not self._tables.budget.resting:
            effects += self._drafter.begin(branches, max_new_tokens)
        return [*effects, *self._tables.first_wake(self._now)]

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:
        accepted = len(output) - (reason != "stop")
        trials, self._trials = self._trials, self._drafter.model_stats.trials
        usual = trials == self._trials  # no answer waited for a draft model to see what that takes
        self._tables.walked(output, accepted, self._step_size, ends=reason is not None, usual=usual)
        self._answered = self._now
        # Alone in its step: else the answers of a step would drift apart, each with steps of its own.
        self._drafter.may_wait = self._step_size.sequences <= 1

    @property
    def _wanted(self) -> int:
        return self._tree.num_sent + AHEAD if self._tables.budget.awake else 0

    def _next_segment(self) -> list[PrefixNode]:
        tables, drafter, drafts = self._tables, self._drafter, list[PrefixNode]()
        if tables.most and drafter.may_draft:
            drafted = drafter.draft(tables.most, self._tree.head.position)
            if self._waits and drafter.waits(drafted.probs, tables.most, self._now):
                return []
            drafts = tables.take(drafted)
        nodes = self._admitted([self._tree.head, *drafts])
        self._decoder.goes_on = self._goes_on if tables.budget.resting and len(nodes) == 1 else None
        tables.sent(nodes[1:], self._now - self._answered)
        return nodes

    # ---- meanwhile --------------------------------------------------------------------------------------------------
    @property
    def _is_due(self) -> bool:
        return self._tables.is_due

    def _learn(self) -> list[Effect]:
        return [WakeAt(self._now)] if self._tables.learn() else []

    def stats(self) -> dict[str, float]:
        decoder = self._decoder
        counts = {"forwards": decoder.forwards, "rows": decoder.rows, "draft_forwards": self._drafter.forwards}
        return {name: float(count) for name, count in counts.items()} | self._tables.stats()


lookup_tree = Strategy(
    name="lookup_tree",
    machine=LookupTree,
    text_of="front",
    uses_draft_model=True,
)
