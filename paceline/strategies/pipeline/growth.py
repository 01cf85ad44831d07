"""Growth of the draft tree: which drafts are asked for and merged into it, from look-up tables or a draft model.

Tables answer at once. A draft model is asked for forwards, which run beside the target's: its tree grows while segments
are under way, so that the next one is mostly drafted when a stage is free. Where it is not, the segment waits as long
as that is expected to pay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, runtime_checkable

from paceline.core.batching.segment import StepSize
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.growing_tree import GrowingTree, LayerSource, Node, Path
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS, LookupTable
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.strategies.base import Branch, Effect, MachineConfig, Sampled, Scored
from paceline.strategies.decoding.drafter_feed import DrafterFeed, TreeDrafter
from paceline.strategies.pipeline.model_drafter import ModelDrafter
from paceline.strategies.pipeline.options import PipelineOptions
from paceline.strategies.pipeline.segments import SegmentDecoder

MAX_GROWTH: Final = 4  # trees' worth of nodes that one context is asked for at most
SHARE: Final = 0.75  # of a node's probability, that its best child has, about
WHOLE_LAYERS: Final = 7  # forwards of the draft model for a tree that is drafted whole at most: FlowSpec's d0 + 1
PATIENCE: Final = 3.0  # draft forwards' time that a segment waits for one at most
FIRST_RATE: Final = 10.0, 0.4  # tokens a second of an answer before it has any, and for how many s that counts


@runtime_checkable
class LayerDrafter(TreeDrafter, LayerSource, Protocol):
    """A drafter that can also be asked for the candidates of a whole layer."""


class TreeGrowth:
    """Drafts of one answer. `is_new_round`: the head is none of the nodes that were drafted."""

    def __init__(
        self,
        config: MachineConfig,
        options: PipelineOptions,
        tree: GrowingTree,
        decoder: SegmentDecoder,
        drafter: TreeDrafter | None,
    ) -> None:
        """drafter: in place of its own, which drafts from look-up tables and the text."""
        stats = OnlineStats() if config.stats is None else config.stats
        table = LookupTable(config.vocab_size) if config.table is None else config.table
        self._config, self._options, self._tree, self._decoder = config, options, tree, decoder
        self._drafter: TreeDrafter = drafter or NgramDrafter(
            table, config.sampling, eos_ids=config.eos_ids, stats=stats.drafter
        )
        self._feed = DrafterFeed(self._drafter, config.vocab_size, samples=config.takes_tokens)
        self._model = (
            ModelDrafter(config, stats.draft_model, rescoring=options.rescoring) if options.drafter == "auto" else None
        )
        self._ignores_model = drafter is not None or options.drafting.ahead == 0
        self._texts: list[tuple[int, ...]] = []  # what tables would read, while a model drafts
        self._output: list[int] = []  # likewise, behind the last one
        self.is_new_round = True
        self.rounds = 0  # trees begun
        self.deadline: float | None = None  # until when the next segment waits for the draft model
        self._drafted = 0  # nodes asked for since the head moved
        self._forwards = 0  # of the draft model, when the head left the tree, or the last tree was drafted
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
        texts[-1] = (*texts[-1], *self._config.targets)
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
            self._forwards = self._forwards if drafted else self._model.forwards
            self._output.append(token)

    def read(self, output: Iterable[int]) -> None:
        """The tokens of a walk, for tables; they learn from the rows answered too."""
        if self._model is not None:
            self._decoder.pop_rows()
            return
        feed, decoder, sequences = self._feed, self._decoder, self._step_size.sequences
        feed.append(output)
        rows = decoder.pop_rows()
        new_rows = feed.new_rows(sequences, paused=False)
        feed.teach(feed.row_lessons(rows, decoder.head, decoder.plain, new_rows))
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
        if self._model is None:
            return []
        paths = self._deepest()[1] if self._options.expand == "layers" else ()
        return self._model.compute(self._budget(), now, paths)

    def holds(self) -> bool:
        """Nothing is to be sent until the draft model has drafted the whole of a tree or layer."""
        options, model = self._options, self._model
        if model is None:
            return False
        match options.expand:
            case "none":
                return self.is_new_round and not self._is_whole(model)
            case "layers":
                waiting = self._tree.head.row is None or bool(self._tree.waiting)
                return not waiting and not model.knows(self._deepest()[1])
            case "tree":
                return not options.by_score and not self._is_sendable() and not self._is_whole(model)

    def _is_whole(self, model: ModelDrafter) -> bool:
        return model.forwards - self._forwards >= WHOLE_LAYERS or model.complete(self._budget())

    def waits(self, room: int, now: float) -> bool:
        """The next segment waits for the draft model until `deadline`, because of the drafts that are expected by then.
        Call after `expand`. room: rows it may have."""
        self.deadline, model = None, self._model
        if model is None or self._options.expand != "tree" or not self._options.by_score:
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

    def _is_sendable(self) -> bool:
        """Drafts wait to be sent, besides the head."""
        return any(node is not self._tree.head for node in self._tree.waiting)

    def _budget(self) -> int:
        """Nodes of the draft model's tree: what has been sent, and more than the next segment takes."""
        size, tree = self._options.tree, self._tree
        if self._options.expand == "none":
            return size
        if not self._options.by_score:
            return min(self._drafted + size, MAX_GROWTH * size)
        sent = len(tree) - len(tree.waiting)
        return min(sent + 2 * self._options.drafting.rows, MAX_GROWTH * size)

    # ---- drafts -----------------------------------------------------------------------------------------------------
    def expand(self, room: int) -> None:
        """Draft, where the tree is to grow. room: rows of the next segment.

        In order of score, as much is drafted as the next segment takes: the rest is while that is on its way. A tree
        that is sent in layers is drafted whole.
        """
        options, tree = self._options, self._tree
        if options.drafting.ahead == 0:
            return
        match options.expand:
            case "none" if self.is_new_round:
                self._draft(options.tree)
            case "tree" if self._model is not None:
                if options.by_score or not self._is_sendable():
                    self._draft(self._budget())
            case "tree":
                waiting = len(tree.waiting)
                wanted = len(tree) - waiting + room
                if not options.by_score:
                    wanted = options.tree if waiting or not self._drafted else self._drafted + options.tree
                wanted = min(wanted, MAX_GROWTH * options.tree)
                if self._drafted == 0 or (waiting < room and self._drafted < wanted):
                    self._draft(wanted)
            case "layers" if tree.head.row is not None and not tree.waiting:
                self._add_layer()
            case _:
                pass

    def _draft(self, count: int) -> None:
        """Merge a tree of the present context into the tree. Drafts that still wait are of an older one."""
        self._feed.catch_up()
        if self._drafted == 0 or self._model is not None:
            self._tree.forget_waiting()
        self.rounds += self.is_new_round and self._drafted == 0
        drafter = self._drafter
        drafted = drafter.draft(count, self._tree.head.position) if self._model is None else self._model.draft(count)
        self._tree.merge(drafted, self._admits)
        self._drafted, self._forwards = count, self.draft_forwards

    def _deepest(self) -> tuple[list[Node], list[Path]]:
        """The deepest nodes, and their paths below the head."""
        deepest = max(node.position for node in self._tree.nodes)
        frontier = [node for node in self._tree.nodes if node.position == deepest]
        return frontier, [tuple(self._tree.path(node)) for node in frontier]

    def _add_layer(self) -> None:
        """The best children of the deepest nodes: one layer of a segment's size (PipeDec)."""
        self._feed.catch_up()
        source: object = self._model or self._drafter
        assert isinstance(source, LayerSource), "layers need a drafter that is asked for them"
        frontier, paths = self._deepest()
        found = source.successors(paths)
        scored = [
            (-node.score * prob, order, node, token)
            for order, (node, candidates) in enumerate(zip(frontier, found, strict=True))
            for token, prob in candidates
            if self._admits(node, token)
        ]
        scored.sort(key=lambda each: each[:2])
        for negative, _, node, token in scored[: self._options.drafting.rows]:
            self._tree.add_child(node, token, -negative)

    def _admits(self, parent: Node, token: int) -> bool:
        """A draft may be verified: the answer goes on behind it, and its context holds it."""
        position = parent.position + 1
        return position < self._config.max_tokens and self._decoder.fits(position) and token not in self._config.eos_ids
