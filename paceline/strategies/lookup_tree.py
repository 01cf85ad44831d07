"""`lookup_tree` (DIAA): one side drafts a tree without a draft model and verifies it in one forward.

Drafts come from tables of what the model predicted after each token, and from repetitions of the text
(`core.drafting.ngram_drafter`). At each node the target's own token is sampled with the common noise, and verification
goes on as long as a draft holds that token: so the text is `autoregressive`'s at any temperature, with penalties, masks
and logprobs. The number of drafts follows from measured times and acceptance (`core.drafting.budget`). The tables learn
from a step's rows while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import AdaptiveBudget, OnlineStats
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.strategies.base import (
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
    Strategy,
    TimerFired,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import MAX_LEARNT_ROWS, DrafterFeed, PrefixNode, PrefixTree, TreeDrafter
from paceline.wire.messages import DraftLimits

DRAFTS_PER_ROW: Final = 4  # drafts of one step, by the rows that `DraftLimits` allows a forward
LEARN_DELAY_S: Final = 0.001  # start of the engine's thread, before lessons compete with it for the interpreter
MAX_LATE_TOKENS: Final = 64  # observed before a forward for its drafts; more wait for the next forward


class LookupTree:
    """Needs no peer and ignores every event about one."""

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        budget: AdaptiveBudget | None = None,
    ) -> None:
        """drafter, budget: in place of its own, for baselines."""
        online_stats = OnlineStats() if config.means.stats is None else config.means.stats
        table = LookupTable(config.output.vocab_size) if config.means.table is None else config.means.table
        self._config = config
        self._tree = PrefixTree(len(config.seat.targets))
        self._decoder = BranchDecoder(
            config.output,
            rescoring=config.options.rescoring,
            lazy=True,
            keep_plain=config.output.needs_dists,
            samples=config.takes_tokens,
        )
        self._drafter: TreeDrafter = drafter or NgramDrafter(
            table, config.output.sampling, eos_ids=config.output.eos_ids, stats=online_stats.drafter
        )
        self._budget = budget or AdaptiveBudget(online_stats.budget, rows=_max_drafts(config.options.drafting))
        self._feed = DrafterFeed(self._drafter, config.output.vocab_size, samples=config.takes_tokens)
        self._woken = False  # since the forward under way was asked for
        self._expected = 0.0  # accepted drafts of the forward under way, by the drafter's probabilities
        self._step_size = online_stats.budget.guard.last_step
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
                targets, resting = self._config.seat.targets, self._budget.resting
                prompts = [branch.prompt for branch in branches]
                self._feed.begin([*prompts[:-1], (*prompts[-1], *targets)])
                self._decoder.num_top = 0 if resting else NUM_SUCCESSORS
                most = min(int(min(self._feed.rows_per_step, MAX_LEARNT_ROWS)), len(prompts[-1]) - 1)
                num_dists = self._budget.take_prompt_rows(max(0, most))
                effects = self._decoder.start(
                    branches, targets, self._tree.head, max_new_tokens, num_prompt_dists=num_dists
                )
                return effects if resting else [*effects, WakeAt(self._began + LEARN_DELAY_S)]
            case Scored(now=now, step=step) | Sampled(now=now, step=step):
                self._step_size = step
                return self._verify(now) if self._decoder.take(event) else []
            case TimerFired(now):
                return [WakeAt(now)] if self._work() else []
            case Cancelled(reason):
                return [self._finish(reason)]
            case _:
                return []

    # ---- a step -----------------------------------------------------------------------------------------------------
    def _verify(self, now: float) -> list[Effect]:
        """Emit the accepted drafts and one token more, then ask for the next forward."""
        if not self._woken and self._budget.awake:
            self._feed.slice(self._step_size.sequences)  # the forward was too short for it
        config, head = self._config, self._tree.head
        effects: list[Effect] = []
        output: list[int] = []
        reason: FinishReason | None = "length" if head.position >= config.output.max_tokens else None
        lane = None if self._decoder.log_evidence is None else config.seat.side
        end: Emit | None = None
        while reason is None and (token := self._decoder.sample(head)) is not None:
            emit = Emit(token, head.plain, lane, self._decoder.mixer.decided_by)
            if token in config.output.eos_ids:
                reason, end = "stop", emit
                break
            effects.append(emit)
            output.append(token)
            head = self._tree.advance(token)
            if head.position >= config.output.max_tokens or not self._decoder.fits(head.position):
                reason = "length"
        timed = self._decoder.timed
        if timed is not None:
            self._record_step(len(output) - (reason != "stop"), *timed)
        self._feed.append(output)
        self._take_lessons(head, timed is None)
        if reason is not None:
            if self._feed.backlog <= MAX_LATE_TOKENS:
                self._feed.finish()  # a short answer has had no step to learn in
            return [*effects, self._finish(reason, end)]
        self._woken = False
        drafts = self._draft(head) if self._budget.awake else []
        effects += self._decoder.commit_to(head)
        effects += self._decoder.append_rows([head, *drafts], head, now)
        return [*effects, WakeAt(now + LEARN_DELAY_S)] if self._budget.awake and self._feed.is_due else effects

    def _draft(self, head: PrefixNode) -> list[PrefixNode]:
        """Nodes to verify below the head, parents first."""
        max_drafts = self._budget.max_draft_tokens()
        if max_drafts == 0 or self._feed.backlog > MAX_LATE_TOKENS:
            return []
        self._feed.catch_up()
        drafted = self._drafter.draft(max_drafts, head.position)
        drafted = drafted.first(self._budget.choose(drafted.probs))
        last = self._config.output.max_tokens - 1  # a longer prefix has no next token
        nodes: list[PrefixNode | None] = []
        for token, parent_index in zip(drafted.tokens, drafted.parents, strict=True):
            parent = head if parent_index < 0 else nodes[parent_index]
            fits = parent is not None and parent.position < last and self._decoder.fits(parent.position + 1)
            is_draft = fits and token not in self._config.output.eos_ids
            nodes.append(parent.child(token) if parent is not None and is_draft else None)
        admitted = self._decoder.admitted(head, [node for node in nodes if node is not None])
        if len(admitted) == len(nodes):
            self._expected = sum(drafted.probs)
        else:
            kept = set(admitted)
            self._expected = sum(prob for node, prob in zip(nodes, drafted.probs, strict=True) if node in kept)
        return admitted

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
    def _work(self) -> bool:
        """A slice of what is to be done while a forward runs; True if anything is left."""
        self._woken = True
        if self._budget.resting:
            return False
        is_left = self._feed.slice(self._step_size.sequences)
        return is_left and (self._budget.awake or self._decoder.timed is None)

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
