"""Pipelined tree speculation as FlowSpec's evaluation compares it with `pipeline`: naive, pruned, PipeDec, unsorted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, cast

from paceline.core.drafting.ngram_drafter import Candidates
from paceline.strategies.base import Effect, MachineConfig, Strategy
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree, TreeDrafter
from paceline.strategies.decoding.table_drafts import may_follow
from paceline.strategies.drafting import AnswerDrafter, ModelDrafter
from paceline.strategies.pipeline import MAX_GROWTH, TREE_NODES, Pipeline, TreeGrowth, pipeline

WHOLE_LAYERS: Final = 7  # forwards of the draft model for a tree that is drafted whole at most: FlowSpec's d0 + 1

Path = tuple[int, ...]


class LayerDrafter(Protocol):
    """A drafter that is asked for many nodes at once."""

    def successors(self, paths: Sequence[Path]) -> Sequence[Candidates]:
        """Candidates after each path of tokens below the present context; the empty path is the context itself."""
        ...


class LayeredTree(PrefixTree):
    """Nodes are sent in layers."""

    def best(self, count: int) -> list[PrefixNode]:
        return sorted(self.waiting, key=lambda node: (node.position, node.number))[:count]


class ModelAlone(ModelDrafter):
    """A draft model beside which no tables draft: that of the paper."""

    def _tables(self) -> None:
        return None

    def compute(self, budget: int, least: float, now: float, *, beside: bool) -> list[Effect]:  # noqa: ARG002
        return super().compute(budget, 0.0, now, beside=beside)  # trees are drafted whole, whatever that gains


class WholeModel(ModelAlone):
    """A draft model that says when it has drafted all that was asked for."""

    paths: Sequence[Path] = ()  # in place of a tree: candidates after these are wanted

    def complete(self, budget: int) -> bool:
        """More forwards would add nothing to the tree of so many nodes."""
        return self._decoder.idle and not (self._has_room and self._missing(budget))

    def knows(self, paths: Sequence[Path]) -> bool:
        """More forwards would add nothing to what is drafted after these paths below the head."""
        missing = any(node.own_drafts is None and self._may_follow(node) for node in map(self._node, paths))
        return not missing or (self._decoder.idle and not self._has_room)

    def successors(self, paths: Sequence[Path]) -> list[Candidates]:
        return [self.known(self._node(path)) for path in paths]

    def _missing(self, budget: int) -> dict[PrefixNode, float]:
        if not self.paths:
            return super()._missing(budget)
        above = self._tree.head.position
        nodes = [self._tree.head, *(node for path in self.paths for node in self._node(path).path_below(above))]
        return dict.fromkeys(filter(self._lacks, nodes), 1.0)

    @property
    def _has_room(self) -> bool:
        return self._decoder.spare_rows(()) > 0

    def _node(self, path: Path) -> PrefixNode:
        node = self._tree.head
        for token in path:
            node = node.child(token)
        return node


@dataclass(eq=False)
class WholeTrees(TreeGrowth):
    """A tree is drafted as a whole, once a round; nothing is sent until then."""

    _forwards: int = 0  # of the draft model, when the head left the tree, or the last tree was drafted

    @property
    def _model(self) -> WholeModel | None:
        return cast("WholeModel | None", self.drafter.model)

    def advance(self, *, drafted: bool) -> None:
        super().advance(drafted=drafted)
        if not drafted:
            self._forwards = self.drafter.forwards

    def prepare(self) -> None:
        """Tell the draft model what is wanted next."""

    def holds(self) -> bool:
        """Nothing is to be sent until the draft model has drafted the whole of a tree or layer."""
        return self.is_new_round and not self._is_whole()

    def waits(self, room: int, now: float) -> bool:  # noqa: ARG002  # no segment waits for a better one
        return False

    def expand(self, room: int) -> None:  # noqa: ARG002  # the tree is of one size
        if self.config.options.drafting.ahead and self.is_new_round:
            self._draft(self.nodes)

    @property
    def wanted(self) -> int:
        return self.nodes

    def _draft(self, count: int) -> None:
        super()._draft(count)
        self._forwards = self.drafter.forwards

    def _is_whole(self) -> bool:
        """There is no draft model that would add anything to the tree."""
        model = self._model
        if model is None:
            return True
        return model.forwards - self._forwards >= WHOLE_LAYERS or model.complete(self.wanted)


class WholeContexts(WholeTrees):
    """A tree grows with every context, by whole trees."""

    def holds(self) -> bool:
        return not self._is_sendable() and not self._is_whole()

    def expand(self, room: int) -> None:
        if not self.config.options.drafting.ahead:
            return
        if self._model is not None:
            if not self._is_sendable():
                self._draft(self.wanted)
            return
        waiting = len(self.tree.waiting)
        wanted = self.nodes if waiting or not self._drafted else self._drafted + self.nodes
        wanted = min(wanted, MAX_GROWTH * self.nodes)
        if self._drafted == 0 or (waiting < room and self._drafted < wanted):
            self._draft(wanted)

    @property
    def wanted(self) -> int:
        return min(self._drafted + self.nodes, MAX_GROWTH * self.nodes)

    def _is_sendable(self) -> bool:
        """Drafts wait to be sent, besides the head."""
        return any(node is not self.tree.head for node in self.tree.waiting)


class Layers(WholeTrees):
    """One layer of a segment's size is added below the deepest (PipeDec)."""

    def prepare(self) -> None:
        if (model := self._model) is not None:
            model.paths = self._deepest()[1]

    def holds(self) -> bool:
        model = self._model
        waiting = not self.tree.head.cached or bool(self.tree.waiting)
        return model is not None and not waiting and not model.knows(self._deepest()[1])

    def expand(self, room: int) -> None:  # noqa: ARG002  # a layer is of one size
        tree = self.tree
        if not self.config.options.drafting.ahead or not tree.head.cached or tree.waiting:
            return
        feed = self.drafter.feed
        feed.catch_up()
        source = cast("LayerDrafter", self._model or feed.drafter)
        frontier, paths = self._deepest()
        scored = [
            (-node.score * prob, order, node, token)
            for order, (node, candidates) in enumerate(zip(frontier, source.successors(paths), strict=True))
            for token, prob in candidates
            if may_follow(self.config, self.decoder, node, token)
        ]
        scored.sort(key=lambda each: each[:2])
        for negative, _, node, token in scored[: self.config.options.drafting.rows]:
            tree.add(node, token, -negative)

    @property
    def wanted(self) -> int:
        return min(self.tree.num_sent + 2 * self.config.options.drafting.rows, MAX_GROWTH * self.nodes)

    def _deepest(self) -> tuple[list[PrefixNode], list[Path]]:
        """The deepest nodes, and their paths below the head."""
        nodes = sorted(self.tree.head.subtree(), key=lambda node: (node.position, node.number))
        frontier = [node for node in nodes if node.position == nodes[-1].position]
        above = self.tree.head.position
        return frontier, [tuple(each.token for each in node.path_below(above)) for node in frontier]


class Pruned(Pipeline):
    """Whole trees in layers, verified and pruned at every segment."""

    def __init__(
        self,
        config: MachineConfig,
        *,
        drafter: TreeDrafter | None = None,
        tree: type[PrefixTree] = LayeredTree,
        growth: type[WholeTrees] = WholeTrees,
        nodes: int = TREE_NODES,
        least_gain: float = 0.0,
    ) -> None:
        drafts = AnswerDrafter(config, drafter, model=WholeModel)
        super().__init__(config, drafter=drafts, tree=tree, growth=growth, nodes=nodes, least_gain=least_gain)

    def _compute(self) -> list[Effect]:
        cast("WholeTrees", self._growth).prepare()
        return super()._compute()

    def _next_segment(self) -> list[PrefixNode]:
        return [] if cast("WholeTrees", self._growth).holds() else super()._next_segment()


class Naive(Pruned):
    """Verified once all segments of a tree have come."""

    def __init__(self, config: MachineConfig, *, drafter: TreeDrafter | None = None, nodes: int = TREE_NODES) -> None:
        super().__init__(config, drafter=drafter, nodes=nodes)
        self._max_under_way = config.means.depth

    def _step(self) -> list[Effect]:
        return super()._step() if self._decoder.idle else self._compute()

    def _fill(self, *, waits: bool = True) -> list[Effect]:
        return super()._fill(waits=waits) if self._decoder.idle else self._compute()


Way = Callable[..., Pipeline]

UNSORTED: Final[Way] = partial(Pruned, growth=WholeContexts, least_gain=0.1)  # grows, and is sent in layers
PIPEDEC: Final[Way] = partial(Pruned, tree=PrefixTree, growth=Layers)
WAYS: Final[Mapping[str, Way]] = {
    "naive": Naive,
    "pruned": Pruned,
    "PipeDec": PIPEDEC,
    "without score order": UNSORTED,
    "full": Pipeline,
}


def strategy_of(way: str) -> Strategy:
    """The record of a way, by a name of its own."""
    return replace(pipeline, name=f"pipeline, {way}", machine=WAYS[way])
