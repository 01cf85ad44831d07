"""N-gram drafts for tree nodes whose distribution is not known yet (`core.drafting.ngram_drafter`).

A distribution after a prefix is known only once the prefix has been computed, so from distributions alone a tree grows
one level a forward. N-gram drafts let a tree go several levels deeper; the strategy decides whether such rows pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.ngram_drafter import Context, NgramDrafter
from paceline.strategies.base import Branch, MachineConfig
from paceline.strategies.decoding.prefix_tree import PrefixNode

MAX_PROMPT_TOKENS = 2048  # of the end of each prompt, that are read: two microseconds each


class NgramDrafts:
    """Drafts of one side for one answer. Must observe every target in order."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._unread: list[Sequence[int]] = []  # prompts
        self._output: list[int] = []  # output tokens behind the last prompt, while it is unread
        self._last_two: tuple[int | None, int | None] = None, None  # tokens before the head
        self._head: PrefixNode | None = None  # root of `_contexts`
        self._contexts: dict[PrefixNode, Context] = {}

    @staticmethod
    def of(config: MachineConfig, online_stats: OnlineStats) -> NgramDrafts | None:
        """None where nothing is to be drafted, or there are no tables to draft from."""
        if config.table is None or config.options.drafting.ahead == 0:
            return None
        return NgramDrafts(
            NgramDrafter(config.table, config.sampling, eos_ids=config.eos_ids, stats=online_stats.drafter)
        )

    def start(self, branches: Sequence[Branch], targets: Sequence[int]) -> None:
        """Set the prompts. Nothing is drafted until `read` has been called for each of them."""
        self._unread = [branch.prompt[-MAX_PROMPT_TOKENS:] for branch in branches]
        self._output = list(targets)
        self._last_two = _last_two((*branches[-1].prompt[-2:], *targets))

    def read(self) -> None:
        """Read the next prompt, if any is left. Takes milliseconds: call it when nothing else waits."""
        if not self._unread:
            return
        text = self._unread.pop(0)
        if self._unread:
            self._drafter.read(text)
            return
        for token in (*text, *self._output):
            self._drafter.observe(token)

    def observe_target(self, head: PrefixNode, token: int) -> None:
        """Observe the target after `head`.

        The table learns this side's own distribution there, at temperature 1 and without constraint, since its entries
        outlive the answer and serve others with other sampling. The distribution of both sides together is known only
        after logits processing, if at all.
        """
        before, last = self._last_two
        if last is None:
            return  # the prompts are not known yet: `start` receives this target
        if self._unread:
            self._output.append(token)
        else:
            self._drafter.observe(token)
        self._last_two, self._head = (last, token), None
        if head.raw_head is not None:
            self._drafter.learn(last, head.raw_head, before=before)

    def children(self, node: PrefixNode, head: PrefixNode) -> Sequence[tuple[int, float]]:
        """Tokens that may follow, each with its probability of being the target."""
        if self._unread or self._last_two[1] is None:
            return ()
        if self._head is not head:
            self._head, self._contexts = head, {head: self._drafter.root(head.position)}
        return self._drafter.children(self._context(node))

    def _context(self, node: PrefixNode) -> Context:
        known = self._contexts.get(node)
        if known is None:
            assert node.parent is not None, "below the head"
            known = self._contexts[node] = self._drafter.child(self._context(node.parent), node.token)
        return known


def _last_two(text: Sequence[int]) -> tuple[int | None, int | None]:
    before, last = (None, None, *text)[-2:]
    return before, last
