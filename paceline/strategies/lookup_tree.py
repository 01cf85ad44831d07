"""`lookup_tree` (DIAA): one side drafts a tree without a draft model and verifies it in one forward.

What may come next is guessed from tables of what the model thought after each token and from what the text said before
(`core.drafting.ngram_drafter`). The walk chooses the target's own token at each node, with the common noise, and goes
on where a draft holds it: so the text is `autoregressive`'s at any temperature, with penalties, masks and logprobs. A
guard measures whether that pays and how many rows of it (`core.drafting.budget`). What a step teaches is learnt while
the next one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from paceline.core.batching.segment import UNKNOWN, StepSize
from paceline.core.drafting.budget import AdaptiveBudget, Budget
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.drafting.online_stats import OnlineStats
from paceline.core.drafting.tree_search import NO_DRAFT, DraftTree
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import filter_top, sample
from paceline.strategies.base import (
    Branch,
    Cancelled,
    Effect,
    Emit,
    Event,
    Finish,
    FinishReason,
    MachineConfig,
    Retrieve,
    Retrieved,
    Scored,
    Started,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.strategy import Strategy
from paceline.wire.messages import DraftLimits

ROOM: Final = 4  # drafts of one step, times the rows that a request's way of drafting gives a forward
HEAD_START: Final = 0.001  # s that the engine's thread gets before lessons compete with it for the interpreter
AT_ONCE: Final = 1 << 16  # probabilities looked at before others on the event loop have their turn
LEARNT_IDS: Final = 1 << 19  # probabilities looked at for the lessons of one engine step, of all answers together
OBSERVE_EVERY: Final = 1 / 4  # rows of an engine step, while drafts do not pay
LEARNT_ROWS: Final = 32  # of one answer's step
UNOBSERVED: Final = 4  # output tokens, while no draft needs them, until a forward's time is used to look at them


class TreeDrafter(Protocol):
    """What drafts a tree. `core.drafting.ngram_drafter.Drafter` is one."""

    def read(self, tokens: Iterable[int]) -> None:
        """A whole text that is not the answer's beginning."""

    def observe(self, token: int) -> None:
        """The next token of prompt or output."""

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """The target's law after a row that held `token`, below a row that held `before`."""

    def draft(self, budget: int, position: int) -> DraftTree:
        """At most `budget` nodes below the last observed token, best first. position: of the next output token."""


class LookupTree:
    """Needs no peer and ignores everything about one."""

    def __init__(
        self,
        task: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        budget: Budget | None = None,
        overlap: bool = True,
    ) -> None:
        """drafter, budget: in place of its own, for baselines. overlap: learn while the next forward runs."""
        experience = OnlineStats() if task.stats is None else task.stats
        table = LookupTable(task.vocab_size) if task.table is None else task.table
        self._task = task
        self._paths = PrefixTree(len(task.targets))
        self._decoder = BranchDecoder(
            task.sampling,
            task.vocab_size,
            rescoring=task.options.rescoring,
            mask=task.mask,
            ends=task.eos_ids,
            lazy=True,
        )
        self._drafter: TreeDrafter = drafter or NgramDrafter(
            table, task.sampling, eos_ids=task.eos_ids, stats=experience.drafter
        )
        self._budget = budget or AdaptiveBudget(experience.budget, rows=_max_rows(task.options.drafting))
        self._overlap = overlap
        self._prompts: tuple[Branch, ...] = ()  # not read yet
        self._later: list[Callable[[], None]] = []  # what can be learnt while a forward runs
        self._unobserved: list[int] = []  # output that the drafter has not been told
        self._woken = False  # since the forward under way was asked for
        self._drafted = NO_DRAFT  # below the head, the last time that there was anything
        self._step = UNKNOWN
        self._attention = 0.0  # rows that may be learnt from
        self._ending: tuple[int | None, int] = None, 0  # the last two tokens before the output
        self._drafts = self._accepted = 0
        self._began = 0.0  # s
        self._finished = False

    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started(now):
                self._began = now
                return [Retrieve()]
            case Retrieved(branches, room):
                self._prompts = branches
                rows = min(LEARNT_IDS // self._task.vocab_size, LEARNT_ROWS)
                effects = self._decoder.start(branches, self._task.targets, self._paths.head, room, harvest=rows)
                return [*effects, WakeAt(self._began + HEAD_START)]
            case Scored(ticket, dists, now, step):
                self._step = step
                return self._verify(now) if self._decoder.scored(ticket, dists, now) else []
            case TimerFired(now):
                self._woken = True
                self._read()
                self._observe()
                self._learn(max(1, AT_ONCE // self._task.vocab_size))
                return [WakeAt(now)] if self._later else []
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _verify(self, now: float) -> list[Effect]:
        """The target's own tokens, down the tree as far as it holds them, and one more; then the next forward."""
        self._read()
        if not self._woken:
            self._learn()  # a forward so short leaves no time for it
        head = self._paths.head
        effects: list[Effect] = []
        output: list[int] = []
        reason: FinishReason | None = "length" if head.position >= self._task.max_tokens else None
        lane = None if self._decoder.log_evidence is None else self._task.side
        end: Emit | None = None
        while reason is None and (law := self._decoder.dist(head)) is not None:
            final = filter_top(law, self._task.sampling)
            token = sample(final, self._task.sampling, head.position)
            if token in self._task.eos_ids:
                reason, end = "stop", Emit(token, final, lane)
                break
            effects.append(Emit(token, final, lane))
            output.append(token)
            head = self._paths.advance(token)
            if head.position >= self._task.max_tokens or not self._decoder.fits(head.position):
                reason = "length"
        timed = self._decoder.timed
        if timed is not None:
            self._record_step(len(output) - (reason != "stop"), *timed)
        if reason is not None:
            return [*effects, self._finish(reason, end)]
        self._unobserved += output
        harvested = self._harvest() if timed is None else []  # it was the prompts' forward
        if lessons := [*harvested, *self._lessons(head)]:
            self._later = [*self._later, *lessons][-2 * LEARNT_ROWS :]
        if not self._overlap:
            self._learn()
        self._woken = False
        effects += self._decoder.commit_to(head)
        effects += self._decoder.append_rows([head, *self._draft(head)], head, now)
        return [*effects, WakeAt(now + HEAD_START)] if self._later or len(self._unobserved) >= UNOBSERVED else effects

    def _draft(self, head: PrefixNode) -> list[PrefixNode]:
        """Nodes to verify below the head, parents first."""
        most = self._budget.max_draft_tokens()
        if most == 0:
            return []
        self._observe()
        drafted = self._drafter.draft(most, head.position)
        self._drafted = drafted = drafted.first(self._budget.choose(drafted.probs))
        last = self._task.max_tokens - 1  # a longer prefix has no next token
        nodes: list[PrefixNode | None] = []
        for token, parent in zip(drafted.tree.tokens, drafted.tree.parents, strict=True):
            above = head if parent < 0 else nodes[parent]
            fits = above is not None and above.position < last and self._decoder.fits(above.position + 1)
            nodes.append(above.child(token) if above is not None and fits and token not in self._task.eos_ids else None)
        return [node for node in nodes if node is not None]

    def _record_step(self, accepted: int, own_rows: int, seconds: float) -> None:
        """The forward that was answered, in the guard's books and the report's."""
        step = self._step if self._step.rows else StepSize(own_rows, 1)
        if own_rows == 1:
            self._budget.record(0, 0.0, 0, step, seconds)
            return
        self._drafts += own_rows - 1
        self._accepted += accepted
        self._budget.record(own_rows - 1, sum(self._drafted.probs), accepted, step, seconds)

    # ---- what is learnt ---------------------------------------------------------------------------------------------
    def _learn(self, most: int | None = None) -> None:
        """Do what waits, or a part of it, so that nothing else waits long."""
        if not self._later:
            return
        self._observe()
        waiting, self._later = self._later[:most], self._later[most:] if most else []
        for work in waiting:
            work()

    def _observe(self) -> None:
        """The output that nobody has looked at."""
        for token in self._unobserved:
            self._drafter.observe(token)
        self._unobserved.clear()

    def _read(self) -> None:
        """All prompts, once; the output goes on from the last one."""
        if not self._prompts:
            return
        for branch in self._prompts[:-1]:
            self._drafter.read(branch.prompt)
        text = (*self._prompts[-1].prompt, *self._task.targets)
        for token in text:
            self._drafter.observe(token)
        self._ending = text[-2] if len(text) > 1 else None, text[-1] if text else 0
        self._prompts = ()

    def _lessons(self, head: PrefixNode) -> list[Callable[[], None]]:
        """What the model thought after each row: those that were output overwrite what was known, and come last."""
        rows = self._decoder.pop_branch_dists()  # in any case: laws are large
        sequences = max(1, self._step.sequences)
        rate = (
            OBSERVE_EVERY if self._budget.paused else LEARNT_IDS / self._task.vocab_size
        )  # of one step, of all answers
        self._attention += min(rate, LEARNT_ROWS / sequences) / sequences
        if self._attention < 1.0:
            return []
        self._attention = min(self._attention, LEARNT_ROWS)
        most = int(self._attention)
        self._attention -= min(most, len(rows))
        path: list[PrefixNode] = []
        node = head.parent
        while node is not None and node in rows:
            path.append(node)
            node = node.parent
        path = path[:most]
        aside = [node for node in rows if node not in path][: most - len(path)]
        ordered = [*((node, False) for node in aside), *((node, True) for node in reversed(path))]
        return [partial(self._learn_row, *self._context(node), rows[node], accepted) for node, accepted in ordered]

    def _harvest(self) -> list[Callable[[], None]]:
        """What the model thought at the prompt's end, from the forward that read it; of many prompts less of each."""
        tokens, laws = self._decoder.prompt_dists()
        if not laws:
            return []
        befores = (None, *tokens)
        lessons: list[Callable[[], None]] = [
            partial(self._drafter.learn, token, law, before=before)
            for before, token, law in zip(befores, tokens, laws, strict=False)
        ]
        most = min(LEARNT_ROWS, LEARNT_IDS // self._task.vocab_size) // max(1, self._step.sequences)
        return lessons[-most:] if most else []

    def _learn_row(self, before: int | None, token: int, dists: Sequence[Dist], accepted: bool) -> None:
        self._drafter.learn(token, self._decoder.plain(dists), before=before, accepted=accepted)

    def _context(self, node: PrefixNode) -> tuple[int | None, int]:
        """The last two tokens of what a node stands for."""
        if node.parent is None:
            return self._ending
        return self._ending[1] if node.parent.parent is None else node.parent.token, node.token

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._finished = True
        stats = {
            "forwards": float(self._decoder.forwards),
            "rows": float(self._decoder.rows),
            "drafted": float(self._drafts),
            "accepted": float(self._accepted),
        }
        return Finish(reason, stats | self._budget.stats(), end)


def _max_rows(drafting: DraftLimits) -> int:
    """Drafts in one step at most: 64 for trees, none for who wants none."""
    return ROOM * drafting.rows if drafting.ahead else 0


lookup_tree = Strategy(
    name="lookup_tree",
    summary="one side writes alone and verifies several guessed tokens in one forward, where that is faster",
    machine=LookupTree,
    participants="one side",
    text_of="front",
)
