"""Guesses for prefixes that neither side has computed: from look-up tables and the text itself
(`core.drafting.ngram_drafter`).

A law tells what may follow a prefix only once the prefix has been computed, so by laws alone a tree grows one level a
forward. Guesses that need no law let a forward go several levels deeper; whether such rows pay is for `growth` to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.drafting.ngram_drafter import Context, NgramDrafter
from paceline.core.drafting.online_stats import OnlineStats
from paceline.strategies.base import Branch, MachineConfig
from paceline.strategies.decoding.prefix_tree import PrefixNode

READ = 2048  # tokens of the end of a prompt that are looked through: two microseconds each


class NgramDrafts:
    """Of one side, for one answer. Told every target in order."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter = drafter
        self._unread: list[Sequence[int]] = []  # prompts
        self._output: list[int] = []  # what goes on from the last of them, while it is unread
        self._ending: tuple[int | None, int | None] = None, None  # the two tokens before the head
        self._head: PrefixNode | None = None  # what the contexts hang on
        self._contexts: dict[PrefixNode, Context] = {}

    @staticmethod
    def of(task: MachineConfig, experience: OnlineStats) -> NgramDrafts | None:
        """None where nothing is to be drafted, or there are no tables to draft from."""
        if task.table is None or task.options.drafting.ahead == 0:
            return None
        return NgramDrafts(NgramDrafter(task.table, task.sampling, eos_ids=task.eos_ids, stats=experience.drafter))

    def start(self, branches: Sequence[Branch], targets: Sequence[int]) -> None:
        """The prompts are known. Nothing is guessed until `read` has been called for each of them."""
        self._unread = [branch.prompt[-READ:] for branch in branches]
        self._output = list(targets)
        self._ending = _last_two((*branches[-1].prompt[-2:], *targets))

    def read(self) -> None:
        """The next prompt, if one is left: it takes milliseconds, for which nothing else should wait."""
        if not self._unread:
            return
        text = self._unread.pop(0)
        if self._unread:
            self._drafter.read(text)
            return
        for token in (*text, *self._output):
            self._drafter.observe(token)

    def decided(self, head: PrefixNode, token: int) -> None:
        """The target after `head`.

        What is learnt is what this side's model thought there, at temperature 1 and free of any constraint: rows
        outlive the answer and serve others that are sampled otherwise. What both sides together thought is known as it
        was warped at best.
        """
        before, last = self._ending
        if last is None:
            return  # before the prompts are known: then it comes with them
        if self._unread:
            self._output.append(token)
        else:
            self._drafter.observe(token)
        self._ending, self._head = (last, token), None
        if head.raw_head is not None:
            self._drafter.learn(last, head.raw_head, before=before)

    def children(self, node: PrefixNode, head: PrefixNode) -> Sequence[tuple[int, float]]:
        """Tokens that may follow, each with the probability that it does."""
        if self._unread or self._ending[1] is None:
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
