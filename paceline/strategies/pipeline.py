"""`pipeline` (FlowSpec): a draft tree flows through an engine that has several forwards under way.

The tree is sent in segments, the best nodes first. When one comes back, the walk goes on from the last decided token
through all that is known. Then the tree is pruned to what hangs below the new head, rows under way included; it is
expanded with a tree drafted from the new context, or, where nothing was accepted, with more nodes of the same; and the
next segment is sent. Where nothing under way is left, all of it is dropped and a new tree begins. On an engine with one
forward under way it is step-wise tree speculation.

What the paper's stages do in lockstep happens here when an answer comes: empty segments need no place in the pipe.

Drafts come from look-up tables, which answer at once, or from a draft model. That is asked for forwards, which run
beside the target's: its tree grows while segments are under way, so that the next one is mostly drafted when a stage is
free. Where it is not, the segment waits as long as that is expected to pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from paceline.core.batching.segment import StepSize
from paceline.core.clock import MAX_RANKS, AcceptanceByRank, MovingAverage
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.drafting.tree_search import (
    Candidates,
    DraftTree,
    grow_tree,
    model_margin_class,
)
from paceline.core.sampling.sampler import best_margin, top_by_score
from paceline.strategies.base import (
    Branch,
    DraftModelLost,
    Effect,
    FinishReason,
    Forward,
    FromDraftModel,
    MachineConfig,
    OnDraftModel,
    Prune,
    Sampled,
    Scored,
    Strategy,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS, BranchDecoder
from paceline.strategies.decoding.prefix_tree import DrafterFeed, DraftTokens, PrefixNode, PrefixTree, TreeDrafter
from paceline.strategies.decoding.table_drafts import may_follow
from paceline.strategies.solo import Solo

# Drafts of one answer from a small model that runs on an engine of its own, beside the target's.
#
# The best nodes below the head whose rows are missing are computed together, so that the tree grows best first
# (FlowSpec, eq. 1: a path scores the product of its nodes); rows of accepted drafts stay, rows of others are dropped.
# Drafts are ranked with the common noise, so that they are those the target samples where both models agree. Their
# probabilities are measured: the share of targets at each rank, by the margin between the two best.
#
# Not handled: an answer longer than the draft model's context is drafted up to there, and not beyond.


FRONTIER: Final = 8  # nodes computed at once at most: k of FlowSpec's beam is 10
SHARE: Final = 0.75  # of a node's probability that its best child has, about: below that of the tree's last it is left
MIN_PROB: Final = 0.005  # nodes that are less likely are not computed
FIRST_S: Final = 0.01  # s of a forward, before one has been timed


class ModelDrafter:
    """Asks for forwards and never waits: `draft` returns what is known by now."""

    def __init__(self, config: MachineConfig, rates: AcceptanceByRank, *, rescoring: bool) -> None:
        """rates: of earlier answers, read and written. Its tokens must be the target's."""
        self.forwards = 0
        self._config, self._rates = config, rates
        self._tree = PrefixTree(len(config.seat.targets))
        self._decoder = BranchDecoder(
            config.output,
            rescoring=rescoring,
            samples=True,
            heads=True,
        )
        self._room = 0  # output tokens that its context holds
        self._computing: list[PrefixNode] = []  # nodes of the forward under way
        self._seconds = MovingAverage(0.2)  # of a forward
        self._grown: tuple[int, DraftTree] | None = None  # the tree of so many nodes, while nothing changes it

    # ---- events -----------------------------------------------------------------------------------------------------
    def start(self, branches: Sequence[Branch], max_new_tokens: int | None) -> list[Effect]:
        """Prefill the prompts. Call only where `fits`."""
        self._room = self._config.means.draft_positions - max(len(branch.prompt) for branch in branches)
        room = self._room if max_new_tokens is None else min(self._room, max_new_tokens)
        return _wrapped(self._decoder.start(branches, self._config.seat.targets, self._tree.head, room))

    @staticmethod
    def fits(config: MachineConfig, branches: Sequence[Branch]) -> bool:
        """There is a draft model, and its context is longer than the prompts and what has been decided."""
        longest = max(len(branch.prompt) for branch in branches)
        return config.means.draft_positions > longest + len(config.seat.targets)

    def answered(self, answer: Scored | Sampled) -> None:
        nodes = self._decoder.take(answer)
        if not nodes:
            return
        self.forwards += 1
        self._computing, self._grown = [], None
        if self._decoder.timed is not None:
            self._seconds.add(self._decoder.timed[1])
        for node in nodes:
            if node.own_dist is not None:
                node.own_drafts = self._ranked(node)
                node.own_dist = None  # it holds on to all of the forward's logits

    def advance(self, token: int) -> None:
        """The next token is decided."""
        drafts = self._tree.head.own_drafts
        if drafts is not None:
            rank = drafts.tokens.index(token) if token in drafts.tokens else None
            self._rates.add(drafts.margin_class, rank)
        self._tree.advance(token)
        self._grown = None

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def draft(self, budget: int) -> DraftTree:
        """The best nodes below the head that are known, best first."""
        if self._grown is None or self._grown[0] != budget:
            self._grown = budget, grow_tree(self, self._tree.head, budget)
        return self._grown[1]

    def children(self, context: PrefixNode) -> Candidates:
        """Drafts after a node, best first; none while its row is missing. As of `DraftSource`."""
        drafts = context.own_drafts
        if drafts is None:
            return ()
        return list(zip(drafts.tokens, self._rates.probs(drafts.margin_class), strict=False))

    def child(self, context: PrefixNode, token: int) -> PrefixNode:
        """As of `DraftSource`."""
        return context.child(token)

    # ---- forwards ---------------------------------------------------------------------------------------------------
    def compute(self, budget: int, now: float) -> list[Effect]:
        """A forward of the nodes that the tree of so many nodes lacks most; nothing while one is under way."""
        decoder, head = self._decoder, self._tree.head
        if not decoder.idle:
            return []
        effects = decoder.commit_to(head)
        rows = decoder.missing_rows(head) or self._missing(budget)
        rows = [node for node in rows if node.position <= self._room]
        if not rows or (rows[0].position <= head.position and rows[-1] is not head):
            return _wrapped(effects)
        decided = rows[-1] is head
        rows = rows if decided else rows[: decoder.spare_rows(())]
        if not rows:
            return _wrapped(effects)
        self._computing = [head] if decided else rows
        return _wrapped([*effects, *decoder.append_rows(rows, head, now)])

    def coming(self) -> tuple[list[float], float]:
        """Probabilities of the nodes whose children the next forwards bring, falling, and s until then."""
        seconds = self._seconds.value or FIRST_S
        alive = [node for node in self._computing if node.alive]
        if alive:
            return [self._prob(node) for node in alive], seconds
        head = self._tree.head
        if self._computing and head.own_drafts is None and self._may_follow(head):
            return [1.0], 2 * seconds  # the forward under way is of no use any more
        return [], 0.0

    def _missing(self, budget: int) -> list[PrefixNode]:
        """Nodes of the tree to compute next, parents first."""
        head = self._tree.head
        if head.own_drafts is None:
            return [head] if self._lacks(head) else []
        drafted = self.draft(budget)
        least = drafted.probs[-1] if len(drafted) == budget else 0.0
        nodes: list[PrefixNode] = []
        missing: list[PrefixNode] = []
        for token, parent, prob in zip(drafted.tokens, drafted.parents, drafted.probs, strict=True):
            if prob * SHARE <= least or prob < MIN_PROB or len(missing) == FRONTIER:
                break
            nodes.append((head if parent < 0 else nodes[parent]).child(token))
            if self._lacks(nodes[-1]):
                missing.append(nodes[-1])
        return missing

    def _lacks(self, node: PrefixNode) -> bool:
        return node.own_drafts is None and not node.cached and self._may_follow(node)

    def _may_follow(self, node: PrefixNode) -> bool:
        """Something may be drafted behind this node."""
        within = node.position + 1 < self._config.output.max_tokens and node.position <= self._room
        return within and (node is self._tree.head or node.token not in self._config.output.eos_ids)

    def _below_head(self, node: PrefixNode) -> list[PrefixNode]:
        """The nodes below the head down to this one."""
        return node.path_below(self._tree.head.position)

    def _prob(self, node: PrefixNode) -> float:
        """Estimated probability that the text goes through this node."""
        prob = 1.0
        for each in self._below_head(node):
            drafts = None if each.parent is None else each.parent.own_drafts
            if drafts is None or each.token not in drafts.tokens:
                return 0.0
            prob *= self._rates.probs(drafts.margin_class)[drafts.tokens.index(each.token)]
        return prob

    def _ranked(self, node: PrefixNode) -> DraftTokens:
        own, sampling = node.own_dist, self._config.output.sampling
        assert own is not None
        dist = own.known
        places = top_by_score(dist, sampling, node.position, MAX_RANKS)
        tokens = tuple(int(dist.ids[place]) for place in places if dist.probs[place] > 0.0)
        return DraftTokens(tokens, model_margin_class(best_margin(dist, sampling, node.position, tokens)))


def _wrapped(effects: Sequence[Effect]) -> list[Effect]:
    return [OnDraftModel(effect) for effect in effects if isinstance(effect, Forward | Prune)]


TREE_NODES: Final = 80  # of a tree that is drafted: L
MAX_GROWTH: Final = 4  # trees' worth of nodes that one context is asked for at most
PATIENCE: Final = 3.0  # draft forwards' time that a segment waits for one at most
FIRST_RATE: Final = 10.0, 0.4  # tokens a second of an answer before it has any, and for how many s that counts


class TreeGrowth:
    """Drafts of one answer. `is_new_round`: the head is none of the nodes that were drafted."""

    def __init__(
        self,
        config: MachineConfig,
        tree: PrefixTree,
        decoder: BranchDecoder,
        drafter: TreeDrafter | None,
        *,
        nodes: int = TREE_NODES,
    ) -> None:
        """drafter: in place of its own, which drafts from look-up tables and the text. nodes: of a tree."""
        self._config, self._tree, self._decoder = config, tree, decoder
        self._admits = partial(may_follow, config, decoder)
        self._rows, self._nodes = config.options.drafting.rows, nodes
        self._feed = DrafterFeed(config, drafter)
        rates = (config.means.stats or OnlineStats()).draft_model
        self._model: ModelDrafter | None = ModelDrafter(config, rates, rescoring=config.options.rescoring)
        self._drafts = config.options.drafting.ahead > 0
        self._ignores_model = drafter is not None or not self._drafts
        self._texts: list[tuple[int, ...]] = []  # what tables would read, while a model drafts
        self._output: list[int] = []  # likewise, behind the last one
        self.is_new_round = True
        self.rounds = 0  # trees begun
        self.deadline: float | None = None  # until when the next segment waits for the draft model
        self._drafted = 0  # nodes asked for since the head moved
        self._step_size = StepSize()
        self._began: float | None = None  # the first answer of the engine
        self._tokens = 0  # decided since

    @property
    def draft_forwards(self) -> int:
        return 0 if self._model is None else self._model.forwards

    # ---- events -----------------------------------------------------------------------------------------------------
    def begin(self, branches: Sequence[Branch], max_new_tokens: int | None) -> list[Effect]:
        """Read the prompts, or have the draft model prefill them."""
        texts = [branch.prompt for branch in branches]
        texts[-1] = (*texts[-1], *self._config.seat.targets)
        if self._model is not None and not self._ignores_model and ModelDrafter.fits(self._config, branches):
            self._texts = texts
            return self._model.start(branches, max_new_tokens)
        self._model = None
        self._feed.begin(texts)
        return []

    def model_answered(self, answer: Scored | Sampled) -> None:
        if self._model is not None:
            self._model.answered(answer)

    def model_lost(self) -> None:
        """Draft from tables from now on."""
        if self._model is not None:
            self._model, self.deadline, self._drafted = None, None, 0
            self._feed.begin([*self._texts[:-1], (*self._texts[-1], *self._output)])

    def answered(self, now: float, step: StepSize) -> None:
        """A segment came back."""
        self._step_size = step
        self._began = now if self._began is None else self._began

    def advance(self, token: int, *, drafted: bool) -> None:
        """A token is decided; the head has moved. drafted: it was in the tree."""
        self.is_new_round = not drafted
        self._drafted = 0
        self._tokens += 1
        if self._model is not None:
            self._model.advance(token)
            self._output.append(token)

    def read(self, output: Iterable[int]) -> None:
        """The tokens of a walk, for tables; they learn from the rows answered too."""
        if self._model is not None:
            self._decoder.pop_branch_dists()
            return
        feed, decoder, sequences = self._feed, self._decoder, self._step_size.sequences
        feed.append(output)
        rows = decoder.pop_branch_dists()
        new_rows = feed.new_rows(sequences, paused=False)
        feed.teach(feed.row_lessons(rows, self._tree.head, decoder.mixer.plain, new_rows))
        decoder.num_top = NUM_SUCCESSORS if feed.may_learn(feed.new_rows(sequences, paused=False)) else 0

    @property
    def is_due(self) -> bool:
        """There is something to learn while the next forward runs."""
        return self._model is None and self._feed.is_due

    def learn(self) -> bool:
        """Learn a slice of it; True if anything is left."""
        return self._model is None and self._feed.slice(self._step_size.sequences)

    # ---- the draft model --------------------------------------------------------------------------------------------
    def compute(self, now: float) -> list[Effect]:
        """The draft model's next forward."""
        return [] if self._model is None else self._model.compute(self._budget(), now)

    def waits(self, room: int, now: float) -> bool:
        """The next segment waits for the draft model until `deadline`, because of the drafts that are expected by then.
        Call after `expand`. room: rows it may have."""
        self.deadline, model = None, self._model
        if model is None:
            return False
        coming, seconds = model.coming()
        if not coming:
            return False
        scores = [node.score for node in self._tree.best(room)]
        worst = [0.0] * (room - len(scores)) + scores[::-1]
        gain = sum(max(0.0, SHARE * prob - score) for prob, score in zip(coming, worst, strict=False))
        rate, weight = FIRST_RATE
        elapsed = 0.0 if self._began is None else now - self._began
        if gain <= seconds * (rate * weight + self._tokens) / (weight + elapsed):
            return False
        self.deadline = now + PATIENCE * seconds
        return True

    def _budget(self) -> int:
        """Nodes of the draft model's tree: what has been sent, and more than the next segment takes."""
        return min(self._tree.num_sent + 2 * self._rows, MAX_GROWTH * self._nodes)

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def expand(self, room: int) -> None:
        """Draft, where the tree is to grow: as much as the next segment takes, the rest while that is on its way.
        room: rows of the next segment."""
        if not self._drafts:
            return
        if self._model is not None:
            self._draft(self._budget())
            return
        waiting = len(self._tree.waiting)
        wanted = min(self._tree.num_sent + room, MAX_GROWTH * self._nodes)
        if self._drafted == 0 or (waiting < room and self._drafted < wanted):
            self._draft(wanted)

    def _draft(self, count: int) -> None:
        """Merge a tree of the present context into the tree. Drafts that still wait are of an older one."""
        self._feed.catch_up()
        if self._drafted == 0 or self._model is not None:
            self._tree.drop_waiting()
        self.rounds += self.is_new_round and self._drafted == 0
        head, model = self._tree.head, self._model
        drafted = self._feed.drafter.draft(count, head.position) if model is None else model.draft(count)
        self._tree.merge(drafted, self._admits)
        self._drafted = count


# The machine: what is under way of the tree, and what is sent next.


LEAST_GAIN: Final = 0.1  # expected tokens of a segment that is worth sending


class Pipeline(Solo):
    """As many segments of the tree under way as the engine takes."""

    drafts = True

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        tree: type[PrefixTree] = PrefixTree,
        growth: type[TreeGrowth] = TreeGrowth,
        nodes: int = TREE_NODES,
        least_gain: float = LEAST_GAIN,
    ) -> None:
        """drafter: in place of its own, which drafts from a model where there is one, else from look-up tables. The
        other arguments are for baselines; nodes: of a tree."""
        super().__init__(config, tree(len(config.seat.targets)), several=True)
        self._growth = growth(config, self._tree, self._decoder, drafter, nodes=nodes)
        # One fewer than the engine asks for, which waits at its first stage: what it would hold is better chosen when
        # the stage is free, from what has come by then.
        self._max_under_way = max(1, config.means.depth - 1)
        self._max_rows = max(1, min(config.options.drafting.rows, MAX_OPEN_ROWS))
        self._least_gain = least_gain
        self._waits = True  # the next segment, for drafts of the draft model, where that pays
        self._counts = {"drafted": 0.0, "accepted": 0.0, "segments": 0.0}

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        return [*super()._begin(branches, max_new_tokens), *self._growth.begin(branches, max_new_tokens)]

    # ---- a segment comes back ---------------------------------------------------------------------------------------
    def _step(self) -> list[Effect]:
        self._growth.answered(self._now, self._step_size)
        return super()._step()

    def _advanced(self, token: int, *, drafted: bool) -> None:
        self._counts["accepted"] += drafted
        self._growth.advance(token, drafted=drafted)

    def _walked(self, output: list[int], reason: FinishReason | None) -> None:  # noqa: ARG002
        self._growth.read(output)

    # ---- segments are sent ------------------------------------------------------------------------------------------
    def _fill(self, *, waits: bool = True) -> list[Effect]:
        growth, self._waits = self._growth, waits
        growth.deadline = None
        effects = growth.compute(self._now)
        if self._decoder.forwards == 0:
            return effects  # the prompts have not been computed yet
        effects += super()._fill()
        effects += growth.compute(self._now)
        return effects if growth.deadline is None else [*effects, WakeAt(growth.deadline)]

    def _next_segment(self) -> list[PrefixNode]:
        """The head, or what is worth it. None while they wait for drafts."""
        growth = self._growth
        room = min(self._max_rows, self._decoder.spare_rows(()))
        if room <= 0:
            return []
        growth.expand(room)
        if self._waits and growth.waits(room, self._now):
            return []
        while chosen := self._tree.best(room):
            if self._tree.head.cached and sum(node.score for node in chosen) < self._least_gain:
                break
            if nodes := self._admitted(chosen):
                growth.is_new_round = False
                self._counts["segments"] += 1
                self._counts["drafted"] += len(nodes)
                return nodes
        return []

    # ---- meanwhile --------------------------------------------------------------------------------------------------
    @property
    def _is_due(self) -> bool:
        return self._growth.is_due

    def _wake(self) -> list[Effect]:
        if self._growth.deadline is not None:
            return self._fill(waits=self._now < self._growth.deadline)
        return [WakeAt(self._now)] if self._growth.learn() else []

    def _hear(self, event: FromDraftModel | DraftModelLost) -> list[Effect]:
        if isinstance(event, FromDraftModel):
            self._now = event.answer.now
            self._growth.model_answered(event.answer)
        else:
            self._growth.model_lost()
        return self._fill()

    def _stats(self) -> dict[str, float]:
        decoder, growth = self._decoder, self._growth
        counted = {"rounds": growth.rounds, "draft_forwards": growth.draft_forwards}
        counted |= {"forwards": decoder.forwards, "rows": decoder.rows, "dropped": decoder.dropped}
        return {**self._counts, **{name: float(value) for name, value in counted.items()}}


pipeline = Strategy(
    name="pipeline",
    machine=Pipeline,
    participants="one side",
    text_of="front",
    uses_draft_model=True,
)
