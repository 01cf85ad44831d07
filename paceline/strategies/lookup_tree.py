"""`lookup_tree` (DIAA): one side drafts a tree without a draft model and verifies it in one forward.

Drafts come from tables of what the model predicted after each token, and from repetitions of the text
(`core.drafting.ngram_drafter`). At each node the target's own token is sampled with the common noise, and verification
goes on as long as a draft holds that token: so the text is `autoregressive`'s at any temperature, with penalties, masks
and logprobs. The number of drafts follows from measured times and acceptance (`core.drafting.budget`). The tables learn
from a step's rows while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from paceline.core.batching.segment import UNKNOWN, StepSize
from paceline.core.drafting.budget import AdaptiveBudget, Budget
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.drafting.online_stats import OnlineStats
from paceline.core.drafting.tree_search import NO_DRAFT, DraftTree
from paceline.core.sampling.dist import Dist
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
    Sampled,
    Scored,
    Started,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree
from paceline.strategies.strategy import Strategy
from paceline.wire.messages import DraftLimits

DRAFTS_PER_ROW: Final = 4  # drafts of one step, by the rows that `DraftLimits` allows a forward
LEARN_DELAY_S: Final = 0.001  # start of the engine's thread, before lessons compete with it for the interpreter
SLICE_PROBS: Final = 1 << 16  # probabilities read before others on the event loop have their turn
STEP_PROBS: Final = 1 << 19  # probabilities read for the lessons of one engine step, where rows are distributions
PAUSED_ROWS: Final = 1 / 4  # rows of an engine step that are learnt from, while drafting is paused
MAX_LEARNT_ROWS: Final = 32  # of one answer's step
MAX_UNOBSERVED_TOKENS: Final = 4  # of output: the drafter observes more than these even if no draft needs them


class TreeDrafter(Protocol):
    """Drafts trees. `core.drafting.ngram_drafter.NgramDrafter` is one."""

    def read(self, tokens: Iterable[int]) -> None:
        """Learn from a whole text that the answer does not continue."""

    def observe(self, token: int) -> None:
        """Append the next token of prompt or output."""

    def learn(self, token: int, dist: Dist, *, before: int | None = None, accepted: bool = True) -> None:
        """Record the target's distribution after a row that held `token`, below a row that held `before`."""

    def draft(self, budget: int, position: int) -> DraftTree:
        """At most `budget` nodes below the last observed token, best first. position: of the next output token."""


class LookupTree:
    """Needs no peer and ignores every event about one."""

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        budget: Budget | None = None,
        overlap: bool = True,
    ) -> None:
        """drafter, budget: in place of its own, for baselines. overlap: learn while the next forward runs."""
        online_stats = OnlineStats() if config.stats is None else config.stats
        table = LookupTable(config.vocab_size) if config.table is None else config.table
        self._config = config
        self._tree = PrefixTree(len(config.targets))
        self._decoder = BranchDecoder(
            config.sampling,
            config.vocab_size,
            rescoring=config.options.rescoring,
            mask=config.mask,
            eos_ids=config.eos_ids,
            lazy=True,
            samples=not config.needs_dists,
        )
        self._drafter: TreeDrafter = drafter or NgramDrafter(
            table, config.sampling, eos_ids=config.eos_ids, stats=online_stats.drafter
        )
        self._budget = budget or AdaptiveBudget(online_stats.budget, rows=_max_drafts(config.options.drafting))
        self._overlap = overlap
        self._unread: tuple[Branch, ...] = ()  # branches whose prompts the drafter has not read
        self._lessons: list[Callable[[], None]] = []  # learnt while a forward runs
        self._unobserved: list[int] = []  # output that the drafter has not observed
        self._woken = False  # since the forward under way was asked for
        self._drafted = NO_DRAFT  # below the head, the last time that there was anything
        self._step_size = UNKNOWN
        samples = not (config.needs_dists or config.targets)  # else rows are distributions, which take longer to read
        self._rows_per_step = MAX_LEARNT_ROWS if samples else STEP_PROBS / config.vocab_size  # of all answers together
        self._rows_per_slice = MAX_LEARNT_ROWS if samples else max(1, SLICE_PROBS // config.vocab_size)
        self._learnable_rows = 0.0  # allowance that grows with every step
        self._last_two: tuple[int | None, int] = None, 0  # tokens before the output
        self._num_drafted = self._num_accepted = 0
        self._began = 0.0  # s
        self._finished = False

    def on(self, event: Event) -> Sequence[Effect]:
        if self._finished:
            return []
        match event:
            case Started(now):
                self._began = now
                return [Retrieve()]
            case Retrieved(branches, max_new_tokens):
                self._unread = branches
                self._decoder.num_top = NUM_SUCCESSORS
                effects = self._decoder.start(
                    branches,
                    self._config.targets,
                    self._tree.head,
                    max_new_tokens,
                    num_prompt_dists=int(min(self._rows_per_step, MAX_LEARNT_ROWS)),
                )
                return [*effects, WakeAt(self._began + LEARN_DELAY_S)]
            case Scored(ticket, dists, now, step):
                self._step_size = step
                return self._verify(now) if self._decoder.scored(ticket, dists, now) else []
            case Sampled(ticket, rows, now, step):
                self._step_size = step
                return self._verify(now) if self._decoder.sampled(ticket, rows, now) else []
            case TimerFired(now):
                self._woken = True
                self._read()
                self._observe()
                self._learn(self._rows_per_slice)
                return [WakeAt(now)] if self._lessons else []
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _verify(self, now: float) -> list[Effect]:
        """Emit the accepted drafts and one token more, then ask for the next forward."""
        self._read()
        if not self._woken:
            self._learn()  # the forward was too short to learn meanwhile
        config, head = self._config, self._tree.head
        effects: list[Effect] = []
        output: list[int] = []
        reason: FinishReason | None = "length" if head.position >= config.max_tokens else None
        lane = None if self._decoder.log_evidence is None else config.side
        end: Emit | None = None
        while reason is None and (sampled := self._decoder.sample(head)) is not None:
            token, final = sampled
            if token in config.eos_ids:
                reason, end = "stop", Emit(token, final, lane)
                break
            effects.append(Emit(token, final, lane))
            output.append(token)
            head = self._tree.advance(token)
            if head.position >= config.max_tokens or not self._decoder.fits(head.position):
                reason = "length"
        timed = self._decoder.timed
        if timed is not None:
            self._record_step(len(output) - (reason != "stop"), *timed)
        if reason is not None:
            return [*effects, self._finish(reason, end)]
        self._unobserved += output
        prompt_lessons = self._prompt_lessons() if timed is None else []
        if lessons := [*prompt_lessons, *self._row_lessons(head)]:
            self._lessons = [*self._lessons, *lessons][-2 * MAX_LEARNT_ROWS :]
        if not self._overlap:
            self._learn()
        self._woken = False
        self._decoder.num_top = NUM_SUCCESSORS if self._learnable_rows + self._new_rows() >= 1.0 else 0
        effects += self._decoder.commit_to(head)
        effects += self._decoder.append_rows([head, *self._draft(head)], head, now)
        wakes = self._lessons or len(self._unobserved) >= MAX_UNOBSERVED_TOKENS
        return [*effects, WakeAt(now + LEARN_DELAY_S)] if wakes else effects

    def _draft(self, head: PrefixNode) -> list[PrefixNode]:
        """Nodes to verify below the head, parents first."""
        max_drafts = self._budget.max_draft_tokens()
        if max_drafts == 0:
            return []
        self._observe()
        drafted = self._drafter.draft(max_drafts, head.position)
        self._drafted = drafted = drafted.first(self._budget.choose(drafted.probs))
        last = self._config.max_tokens - 1  # a longer prefix has no next token
        nodes: list[PrefixNode | None] = []
        for token, parent_index in zip(drafted.tree.tokens, drafted.tree.parents, strict=True):
            parent = head if parent_index < 0 else nodes[parent_index]
            fits = parent is not None and parent.position < last and self._decoder.fits(parent.position + 1)
            is_draft = fits and token not in self._config.eos_ids
            nodes.append(parent.child(token) if parent is not None and is_draft else None)
        return [node for node in nodes if node is not None]

    def _record_step(self, accepted: int, own_rows: int, seconds: float) -> None:
        """Record the forward that was answered, for the budget and the report."""
        step = self._step_size if self._step_size.rows else StepSize(own_rows, 1)
        if own_rows == 1:
            self._budget.record(0, 0.0, 0, step, seconds)
            return
        self._num_drafted += own_rows - 1
        self._num_accepted += accepted
        self._budget.record(own_rows - 1, sum(self._drafted.probs), accepted, step, seconds)

    # ---- learning ---------------------------------------------------------------------------------------------------
    def _learn(self, max_lessons: int | None = None) -> None:
        """Do the lessons that wait, or the first of them, so that nothing else waits long."""
        if not self._lessons:
            return
        self._observe()
        lessons, self._lessons = self._lessons[:max_lessons], self._lessons[max_lessons:] if max_lessons else []
        for lesson in lessons:
            lesson()

    def _observe(self) -> None:
        """Let the drafter observe the output."""
        for token in self._unobserved:
            self._drafter.observe(token)
        self._unobserved.clear()

    def _read(self) -> None:
        """Let the drafter read all prompts, once; the output continues the last one."""
        if not self._unread:
            return
        for branch in self._unread[:-1]:
            self._drafter.read(branch.prompt)
        text = (*self._unread[-1].prompt, *self._config.targets)
        for token in text:
            self._drafter.observe(token)
        self._last_two = text[-2] if len(text) > 1 else None, text[-1] if text else 0
        self._unread = ()

    def _row_lessons(self, head: PrefixNode) -> list[Callable[[], None]]:
        """Lessons from the rows answered last. Those of output overwrite table entries, and come last."""
        rows = self._decoder.pop_branch_dists()  # in any case: distributions are large
        self._learnable_rows += self._new_rows()
        if self._learnable_rows < 1.0:
            return []
        self._learnable_rows = min(self._learnable_rows, MAX_LEARNT_ROWS)
        max_rows = int(self._learnable_rows)
        self._learnable_rows -= min(max_rows, len(rows))
        path: list[PrefixNode] = []
        node = head.parent
        while node is not None and node in rows:
            path.append(node)
            node = node.parent
        path = path[:max_rows]
        rejected = [node for node in rows if node not in path][: max_rows - len(path)]
        ordered = [*((node, False) for node in rejected), *((node, True) for node in reversed(path))]
        return [partial(self._learn_row, *self._context(node), rows[node], accepted) for node, accepted in ordered]

    def _new_rows(self) -> float:
        """Rows that one answer may learn from for each of its steps."""
        sequences = max(1, self._step_size.sequences)
        rows_per_step = PAUSED_ROWS if self._budget.paused else self._rows_per_step
        return min(rows_per_step, MAX_LEARNT_ROWS / sequences) / sequences

    def _prompt_lessons(self) -> list[Callable[[], None]]:
        """Lessons from the prompt's end, of the forward that prefilled it; of many prompts fewer of each."""
        tokens, dists = self._decoder.prompt_dists()
        if not dists:
            return []
        befores = (None, *tokens)
        lessons: list[Callable[[], None]] = [
            partial(self._drafter.learn, token, dist, before=before)
            for before, token, dist in zip(befores, tokens, dists, strict=False)
        ]
        max_rows = int(min(MAX_LEARNT_ROWS, self._rows_per_step)) // max(1, self._step_size.sequences)
        return lessons[-max_rows:] if max_rows else []

    def _learn_row(self, before: int | None, token: int, dists: Sequence[Dist], accepted: bool) -> None:
        self._drafter.learn(token, self._decoder.plain(dists), before=before, accepted=accepted)

    def _context(self, node: PrefixNode) -> tuple[int | None, int]:
        """The last two tokens of the node's prefix."""
        if node.parent is None:
            return self._last_two
        return self._last_two[1] if node.parent.parent is None else node.parent.token, node.token

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._finished = True
        stats = {
            "forwards": float(self._decoder.forwards),
            "rows": float(self._decoder.rows),
            "drafted": float(self._num_drafted),
            "accepted": float(self._num_accepted),
        }
        return Finish(reason, stats | self._budget.stats(), end)


def _max_drafts(drafting: DraftLimits) -> int:
    """Drafts in one step at most: 64 by default, none where nothing is to be drafted ahead."""
    return DRAFTS_PER_ROW * drafting.rows if drafting.ahead else 0


lookup_tree = Strategy(
    name="lookup_tree",
    machine=LookupTree,
    participants="one side",
    text_of="front",
)
