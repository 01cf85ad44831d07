"""Drafts of an answer that one side writes alone, and what machines do that wait for them.

Look-up tables and the text itself answer at once (`core.drafting.ngram_drafter`). A draft model, where there is one, is
asked for forwards, which run beside the target's: its tree grows while rows are under way, so that the next drafts are
mostly there when the target's answer comes. Where they are not, the next segment waits as long as that is expected to
pay. Both draft one tree: the model computes the nodes that are likeliest by what either knows, and so reads a whole
chain of the tables' in one forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

from paceline.core.clock import MAX_RANKS
from paceline.core.drafting.budget import DraftModelStats, OnlineStats
from paceline.core.drafting.ngram_drafter import (
    NO_DRAFT,
    Candidates,
    Context,
    DraftTree,
    NgramDrafter,
    grow_tree,
    model_margin_class,
)
from paceline.core.sampling.sampler import best_margin, top_by_score
from paceline.strategies.base import (
    Branch,
    DraftModelLost,
    Effect,
    Emit,
    Finish,
    FinishReason,
    Forward,
    FromDraftModel,
    MachineConfig,
    OnDraftModel,
    Prune,
    Sampled,
    Scored,
    WakeAt,
)
from paceline.strategies.decoding.branch_decoder import BranchDecoder
from paceline.strategies.decoding.prefix_tree import DrafterFeed, DraftTokens, PrefixNode, PrefixTree, TreeDrafter
from paceline.strategies.decoding.table_drafts import LEARN_DELAY_S
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
MENDED: Final = 0.5  # of what the tables would get wrong, that a model gets right, about
LEAST_HELP: Final = 0.01  # accepted tokens that a forward is asked for


class DraftPlace(NamedTuple):
    """A place in the tree that is being drafted, for either source of drafts."""

    node: PrefixNode  # of the draft model's tree
    context: Context | None  # of the tables; None: they are not asked


class ModelDrafter:
    """Asks for forwards and never waits: `draft` returns what is known by now."""

    def __init__(self, config: MachineConfig, stats: DraftModelStats, feed: DrafterFeed) -> None:
        """stats: of earlier answers, read and written. feed: of the tables beside it. Its tokens must be the
        target's."""
        self.forwards = 0
        self._config, self._stats, self._rates, self._feed = config, stats, stats.ranks, feed
        self._beside = False  # the forward under way was asked for beside the target's
        self._tree = PrefixTree(len(config.seat.targets))
        self._decoder = BranchDecoder(
            config.output,
            rescoring=config.options.rescoring,
            samples=True,
            heads=True,
        )
        self._room = 0  # output tokens that its context holds
        self._computing: dict[PrefixNode, float] = {}  # nodes of the forward under way, see `_missing`
        self._grown: tuple[int, DraftTree] | None = None  # the tree of so many nodes, while nothing changes it

    # ---- events -----------------------------------------------------------------------------------------------------
    def start(self, branches: Sequence[Branch], max_new_tokens: int | None, room: int) -> list[Effect]:
        """Prefill the prompts. room: output tokens that its context holds, more than have been decided."""
        self._room = room
        room = room if max_new_tokens is None else min(room, max_new_tokens)
        return _wrapped(self._decoder.start(branches, self._config.seat.targets, self._tree.head, room))

    def answered(self, answer: Scored | Sampled) -> None:
        nodes = self._decoder.take(answer)
        if not nodes:
            return
        self.forwards += 1
        self._computing, self._grown = {}, None
        if self._decoder.timed is not None:
            self._stats.add(self._decoder.timed[1], beside=self._beside)
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
            head, tables = self._tree.head, self._tables()
            root = DraftPlace(head, None if tables is None else tables.root(head.position))
            self._grown = budget, grow_tree(self, root, budget)
        return self._grown[1]

    def children(self, context: DraftPlace) -> Candidates:
        """Drafts after a place, best first. As of `DraftSource`."""
        own, tables = self.known(context.node), self._tables()
        if tables is None or context.context is None:
            return own
        others = tables.children(context.context)
        if not own or not others:
            return own or others
        # The surer of the two, and in what it leaves the other.
        first, second = (own, others) if own[0][1] >= others[0][1] else (others, own)
        drafted = {token for token, _ in first}
        rest = max(0.0, 1.0 - sum(prob for _, prob in first))
        return [*first, *((token, prob * rest) for token, prob in second if token not in drafted)]

    def child(self, context: DraftPlace, token: int) -> DraftPlace:
        """As of `DraftSource`."""
        tables = self._tables()
        below = None if tables is None or context.context is None else tables.child(context.context, token)
        return DraftPlace(context.node.child(token), below)

    def known(self, node: PrefixNode) -> Candidates:
        """What the model itself drafts after a node, best first; none while its row is missing."""
        drafts = node.own_drafts
        if drafts is None:
            return ()
        return list(zip(drafts.tokens, self._rates.probs(drafts.margin_class), strict=False))

    def _tables(self) -> NgramDrafter | None:
        """The tables' drafter, once it has read the text so far."""
        drafter = self._feed.drafter
        return drafter if isinstance(drafter, NgramDrafter) and self._feed.is_current else None

    # ---- forwards ---------------------------------------------------------------------------------------------------
    def compute(self, budget: int, least: float, now: float, *, beside: bool) -> list[Effect]:
        """A forward of the nodes that the tree of so many nodes lacks most; nothing while one is under way, or where
        less than `least` accepted tokens are expected of it. beside: the target computes meanwhile."""
        decoder, head = self._decoder, self._tree.head
        if not decoder.idle:
            return []
        effects = decoder.commit_to(head)
        if head.position > self._room:
            return _wrapped(effects)
        decided = decoder.missing_rows(head)
        wanted = self._missing(budget)
        rows = list(wanted)[: decoder.spare_rows(decided)]
        gain = sum(node.score * wanted[node] for node in rows)
        if not rows or gain < least:
            self._stats.declined += gain >= LEAST_HELP
            return _wrapped(effects)
        self._computing, self._beside = {node: wanted[node] for node in rows}, beside
        rows = [*decided, *(row for row in rows if row is not head)]
        return _wrapped([*effects, *decoder.append_rows(rows, head, now)])

    def coming(self) -> tuple[list[float], float]:
        """What the rows of the forward under way are expected to add to the accepted tokens, and s until they do."""
        seconds = self._stats.seconds(beside=False)
        alive = [node.score * gain for node, gain in self._computing.items() if node.alive]
        if alive:
            return alive, seconds
        head = self._tree.head
        if self._computing and head.own_drafts is None and self._may_follow(head):
            return [SHARE], 2 * seconds  # the forward under way is of no use any more
        return [], 0.0

    def _missing(self, budget: int) -> dict[PrefixNode, float]:
        """Nodes of the tree to compute next, parents first, with what each is expected to add to the probability of
        the best draft after it."""
        head, drafted = self._tree.head, self.draft(budget)
        best = dict(zip(reversed(drafted.parents), reversed(drafted.probs), strict=True))  # child of each node
        missing = {head: _gain(best.get(-1, 0.0))} if self._lacks(head) else {}
        least = drafted.probs[-1] if len(drafted) == budget else 0.0
        nodes: list[PrefixNode] = []
        for index, (token, parent, prob) in enumerate(zip(drafted.tokens, drafted.parents, drafted.probs, strict=True)):
            if prob * SHARE <= least or prob < MIN_PROB or len(missing) == FRONTIER:
                break
            node = (head if parent < 0 else nodes[parent]).child(token)
            node.score = prob
            nodes.append(node)
            if self._lacks(node):
                missing[node] = _gain(best.get(index, 0.0) / prob)
        return missing

    def _lacks(self, node: PrefixNode) -> bool:
        return node.own_drafts is None and not node.cached and self._may_follow(node)

    def _may_follow(self, node: PrefixNode) -> bool:
        """Something may be drafted behind this node."""
        within = node.position + 1 < self._config.output.max_tokens and node.position <= self._room
        return within and (node is self._tree.head or node.token not in self._config.output.eos_ids)

    def _ranked(self, node: PrefixNode) -> DraftTokens:
        own, sampling = node.own_dist, self._config.output.sampling
        assert own is not None
        dist = own.known
        places = top_by_score(dist, sampling, node.position, MAX_RANKS)
        tokens = tuple(int(dist.ids[place]) for place in places if dist.probs[place] > 0.0)
        return DraftTokens(tokens, model_margin_class(best_margin(dist, sampling, node.position, tokens)))


def _gain(prob: float) -> float:
    """Expected accepted tokens of a row more, where the best draft of the tables after it has this probability."""
    return max(SHARE - prob, MENDED * (1.0 - prob))


def _wrapped(effects: Sequence[Effect]) -> list[Effect]:
    return [OnDraftModel(effect) for effect in effects if isinstance(effect, Forward | Prune)]


PATIENCE: Final = 3.0  # draft forwards' time that a segment waits for one at most
MAX_TRY_S: Final = 0.5  # s that a segment waits for a forward that is to show what one takes
FIRST_RATE: Final = 10.0, 0.4  # tokens a second of an answer before it has any, and for how many s that counts


class AnswerDrafter:
    """Drafts of one answer, from tables, from the text and from the draft model where there is one."""

    def __init__(
        self,
        config: MachineConfig,
        drafter: TreeDrafter | None = None,
        *,
        model: type[ModelDrafter] = ModelDrafter,
    ) -> None:
        """drafter: alone, in place of the served ones."""
        self.feed = DrafterFeed(config, drafter)
        self.deadline: float | None = None  # until when the next segment waits for the draft model
        self._config = config
        self.model: ModelDrafter | None = None
        self.model_stats = (config.means.stats or OnlineStats()).draft_model
        self._kind, self._asks = model, drafter is None and config.options.drafting.ahead > 0
        self._began: float | None = None  # the first answer of the engine
        self._tokens = 0  # decided since
        self._lost = 0  # forwards of a model that is lost
        self.may_wait = True  # a segment may, for more than to show what a forward takes
        self.tries = False  # a forward since the target's last answer was to show that

    def begin(self, branches: Sequence[Branch], max_new_tokens: int | None) -> list[Effect]:
        """Have the draft model prefill the prompts. Without this it is not asked."""
        room = self._config.means.draft_positions - max(len(branch.prompt) for branch in branches)
        if not self._asks or room <= len(self._config.seat.targets):
            return []
        self.model = self._kind(self._config, self.model_stats, self.feed)
        return self.model.start(branches, max_new_tokens, room)

    def hear(self, event: FromDraftModel | DraftModelLost) -> None:
        """The draft model has answered, or is lost: from now on the tables draft alone."""
        if isinstance(event, DraftModelLost):
            self._lost, self.model, self.deadline = self.forwards, None, None
        elif self.model is not None:
            self.model.answered(event.answer)

    def answered(self, now: float) -> None:
        """The target has answered."""
        self.tries = False
        self._began = now if self._began is None else self._began

    def advance(self, token: int) -> None:
        """The next token is decided."""
        self._tokens += 1
        if self.model is not None:
            self.model.advance(token)

    @property
    def forwards(self) -> int:
        """Of the draft model."""
        return self._lost + (0 if self.model is None else self.model.forwards)

    @property
    def may_draft(self) -> bool:
        """There is something to draft from by now."""
        return self.model is not None or self.feed.is_current

    def draft(self, budget: int, position: int) -> DraftTree:
        """At most so many nodes below the head, best first. position: of the next output token."""
        if self.model is not None:
            return self.model.draft(budget)
        return self.feed.drafter.draft(budget, position) if self.feed.is_current else NO_DRAFT

    def compute(self, budget: int, now: float, *, beside: bool) -> list[Effect]:
        """The draft model's next forward, towards a tree of so many nodes, where it is expected to be worth its time:
        target and draft model share a machine, but for stages. beside: the target computes meanwhile."""
        if self.model is None:
            return []
        least, tries = LEAST_HELP, not beside and self.model_stats.is_due
        if self._config.means.depth == 1 and not tries:
            if not (beside or self.may_wait):
                return []
            least = max(least, self.model_stats.seconds(beside=beside) * self._rate(now))
        effects = self.model.compute(budget, least, now, beside=beside)
        if tries and effects:
            self.tries = True
            self.model_stats.trials += 1
        return effects

    def waits(self, probs: Sequence[float], room: int, now: float) -> bool:
        """The next segment waits for the draft model until `deadline`, because of the drafts that are expected by then.
        probs: of the nodes that it would have now, falling. room: rows that it may have."""
        self.deadline = None
        if self.model is None:
            return False
        coming, seconds = self.model.coming()
        if not coming:
            return False
        if self.tries:
            self.deadline = now + MAX_TRY_S
            return True
        if not self.may_wait:
            return False
        probs = probs[:room]
        worst = [0.0] * (room - len(probs)) + list(probs[::-1])
        gain = sum(max(0.0, more - least) for more, least in zip(coming, worst, strict=False))
        if gain <= seconds * self._rate(now):
            return False
        self.deadline = now + PATIENCE * seconds
        return True

    def _rate(self, now: float) -> float:
        """Tokens a second of this answer."""
        rate, weight = FIRST_RATE
        elapsed = 0.0 if self._began is None else now - self._began
        return (rate * weight + self._tokens) / (weight + elapsed)


class DraftingSolo(Solo, ABC):
    """Verifies what an `AnswerDrafter` drafts, which may be waited for."""

    drafts = True

    def __init__(
        self, config: MachineConfig, drafter: AnswerDrafter, tree: PrefixTree | None = None, *, several: bool = False
    ) -> None:
        super().__init__(config, tree, several=several)
        self._drafter = drafter
        self._waits = True  # the next segment, for drafts of the draft model, where that pays

    def _begin(self, branches: tuple[Branch, ...], max_new_tokens: int | None) -> list[Effect]:
        self._drafter.feed.begin(branches, self._config.seat.targets)
        effects = [*super()._begin(branches, max_new_tokens), *self._drafter.begin(branches, max_new_tokens)]
        return [*effects, WakeAt(self._now + LEARN_DELAY_S)]

    def _step(self) -> list[Effect]:
        self._drafter.answered(self._now)
        return super()._step()

    def _advanced(self, token: int, *, drafted: bool) -> None:  # noqa: ARG002
        self._drafter.advance(token)

    def _finish(self, reason: FinishReason, end: Emit | None = None) -> Finish:
        self._drafter.feed.remember()
        return super()._finish(reason, end)

    @property
    @abstractmethod
    def _wanted(self) -> int:
        """Nodes of the tree that the draft model computes; 0: none."""

    def _fill(self, *, waits: bool = True) -> list[Effect]:
        drafter, self._waits = self._drafter, waits
        drafter.deadline = None
        idle = self._decoder.idle
        effects = self._compute()
        if self._decoder.forwards == 0:
            return effects  # the prompts have not been computed yet
        if idle or self._max_under_way > 1:
            effects += super()._fill()
            effects += self._compute()
        return effects if drafter.deadline is None else [*effects, WakeAt(drafter.deadline)]

    def _compute(self) -> list[Effect]:
        wanted = self._wanted
        return self._drafter.compute(wanted, self._now, beside=not self._decoder.idle) if wanted else []

    def _wake(self) -> list[Effect]:
        if self._drafter.deadline is not None:
            return self._fill(waits=self._now < self._drafter.deadline)
        return self._learn()

    @abstractmethod
    def _learn(self) -> list[Effect]:
        """Learn a slice of what waits."""

    def _hear(self, event: FromDraftModel | DraftModelLost) -> list[Effect]:
        if isinstance(event, FromDraftModel):
            self._now = event.answer.now
        self._drafter.hear(event)
        return self._fill()
