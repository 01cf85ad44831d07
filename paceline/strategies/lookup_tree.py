"""`lookup_tree` (DIAA): one side drafts a tree without a draft model and verifies it in one forward.

Drafts come from tables of what the model predicted after each token, and from repetitions of the text
(`core.drafting.ngram_drafter`); how many, and what they learn, is `decoding.table_drafts`.
"""

from __future__ import annotations

from paceline.core.drafting.budget import AdaptiveBudget
from paceline.strategies.base import Branch, Effect, FinishReason, MachineConfig, Strategy, WakeAt
from paceline.strategies.decoding.prefix_tree import PrefixNode, TreeDrafter
from paceline.strategies.decoding.table_drafts import TableDrafts
from paceline.strategies.solo import Solo


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
        self._tables = TableDrafts(config, self._tree, self._decoder, drafter=drafter, budget=budget)

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        targets, rows = self._config.seat.targets, self._tables.begin(branches)
        effects = self._decoder.start(branches, targets, self._tree.head, max_new_tokens, num_prompt_dists=rows)
        return [*effects, *self._tables.first_wake(self._now)]

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:
        accepted = len(output) - (reason != "stop")
        self._tables.walked(output, accepted, self._step_size, ends=reason is not None)

    def _next_segment(self) -> list[PrefixNode]:
        nodes = self._admitted([self._tree.head, *self._tables.draft()])
        self._tables.sent(nodes[1:])
        return nodes

    @property
    def _is_due(self) -> bool:
        return self._tables.is_due

    def _wake(self) -> list[Effect]:
        return [WakeAt(self._now)] if self._tables.learn() else []

    def _stats(self) -> dict[str, float]:
        counts = {"forwards": float(self._decoder.forwards), "rows": float(self._decoder.rows)}
        return counts | self._tables.stats()


lookup_tree = Strategy(
    name="lookup_tree",
    machine=LookupTree,
    participants="one side",
    text_of="front",
)
