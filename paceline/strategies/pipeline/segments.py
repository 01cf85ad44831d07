"""Segments of the tree as forwards, of which several are under way, and their rows once they are answered.

The counterpart of `decoding.branch_decoder`, which has one forward under way. A node's row is scored when it is
sampled: at the head of the tree, once. Knows nothing of how nodes are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.aggregation.weights import log_weight
from paceline.core.batching.segment import Segment, SeqId
from paceline.core.drafting.growing_tree import DraftNode, GrowingTree, RowPrune
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SampledRow, filter_top, sample
from paceline.strategies.base import Branch, Effect, Forward, MachineConfig, Prune
from paceline.strategies.decoding.branch_decoder import BranchMixer, prompt_segments
from paceline.strategies.decoding.prefix_tree import PrefixNode, PrefixTree

Rows = Sequence[Dist] | Sequence[SampledRow]


@dataclass(slots=True, eq=False)
class _Sent:
    """A segment under way on every branch."""

    nodes: tuple[DraftNode, ...]
    missing: int  # answers
    parts: dict[int, dict[DraftNode, Dist | SampledRow]] = field(default_factory=dict)  # by branch, what has come

    @property
    def alive(self) -> bool:
        return any(node.alive for node in self.nodes)

    def complete(self) -> dict[DraftNode, tuple[Dist | SampledRow, ...]]:
        """Every branch's row after each node; without nodes of which one of them has dropped the row."""
        parts = [self.parts[branch] for branch in sorted(self.parts)]
        return {node: tuple(part[node] for part in parts) for node in self.nodes if all(node in part for part in parts)}


@dataclass(frozen=True, slots=True, eq=False)
class _KnownRow:
    prefix: PrefixNode
    branches: tuple[Dist | SampledRow, ...]


class SegmentDecoder:
    """Sequences 0..n-1 of a machine, one for each branch. The engine samples the rows of a single branch; those of
    several come as distributions, because what the documents weigh follows from rows that are still under way."""

    def __init__(self, config: MachineConfig, tree: GrowingTree, *, rescoring: bool) -> None:
        self.max_new_tokens: int | None = None  # output tokens that fit the context
        self.log_evidence: float | None = None  # log h of this side's documents (DRAGON); None: it found none
        self.samples = False  # the engine samples, known once the prompts are
        self.num_top = 0  # ids of the head of each row that is sampled from now on
        self.answered = 0  # segments
        self.rows = 0  # in them, of one branch
        self.dropped = 0  # of these: rows that a prune dropped before they were scored
        self._config = config
        self._tree = tree
        self._mixer = BranchMixer(
            config.output,
            rescoring=rescoring,
            keep_heads=False,
            keep_plain=config.output.needs_dists,
        )
        self._branches: tuple[Branch, ...] = ()
        self._output: list[int] = list(config.seat.targets)  # decided
        self._prefixes = PrefixTree(len(config.seat.targets))
        self._prefix: dict[DraftNode, PrefixNode] = {tree.head: self._prefixes.head}  # of nodes sent, and of the head
        self._ticket = 0
        self._under_way: dict[int, tuple[_Sent, int]] = {}  # by ticket, with the branch
        self._rows: dict[DraftNode, _KnownRow] = {}  # after known nodes

    @property
    def under_way(self) -> int:
        """Segments of which something is still wanted."""
        return len({id(sent) for sent, _ in self._under_way.values() if sent.alive})

    @property
    def idle(self) -> bool:
        """Nothing is under way, not even what a prune has dropped."""
        return not self._under_way

    @property
    def head(self) -> PrefixNode:
        return self._prefixes.head

    def fits(self, length: int) -> bool:
        """The context of this side holds so many output tokens."""
        return self.max_new_tokens is None or length <= self.max_new_tokens

    # ---- sending ----------------------------------------------------------------------------------------------------
    def start(self, branches: Sequence[Branch], max_new_tokens: int | None) -> list[Effect]:
        """Prefill every prompt, followed by the output tokens decided so far."""
        self.max_new_tokens = max_new_tokens
        self._branches = tuple(branches)
        scores = [branch.score for branch in branches if branch.score is not None]
        self.log_evidence = log_weight(scores) if scores else None
        self.samples = self._config.takes_tokens and len(branches) == 1
        prefix = tuple(self._output)
        self._mixer.start(self._branches, prefix, self._prefixes.head)
        segments = prompt_segments(self._branches, prefix, self._mixer.num_prefix_rows, 0)
        return self._forwards((self._tree.head,), segments)

    def admit(self, nodes: Sequence[DraftNode]) -> list[DraftNode]:
        """Those of the waiting nodes, parents first, that the answer's constraint allows; the rest are discarded. Call
        `send` next, for these."""
        if self._config.output.mask is None or not self.samples:
            return list(nodes)
        self._make_prefixes(nodes)
        head = self._tree.head
        drafts = [self._prefix[node] for node in nodes if node is not head]
        admitted = set(self._mixer.admitted(self._prefix[head], drafts, self._path_of, leaves=True))
        for node in nodes:
            if node.alive and node is not head and self._prefix[node] not in admitted:
                self._tree.discard(node)
        kept = [node for node in nodes if node.alive]
        for node in set(nodes).difference(kept):
            del self._prefix[node]
        return kept

    def send(self, nodes: Sequence[DraftNode]) -> list[Effect]:
        """Append rows, parents first; they are scored."""
        tree = self._tree
        start = len(self._output) - 1 + tree.num_open_rows  # the head's row is open or among these
        tree.send(list(nodes))
        self._make_prefixes(nodes)
        tokens = tuple(node.token for node in nodes)
        parents = tuple(tree.parent_row(node) for node in nodes)
        ids = tuple(node.row for node in nodes if node.row is not None)
        segments = [
            Segment(SeqId(i), len(branch.prompt) + start, tokens, parents, "all", ids)
            for i, branch in enumerate(self._branches)
        ]
        return self._forwards(tuple(nodes), segments)

    def prune(self, rows: RowPrune) -> list[Effect]:
        return [Prune(SeqId(index), rows.keep, rows.live) for index in range(len(self._branches))]

    def _forwards(self, nodes: tuple[DraftNode, ...], segments: Sequence[Segment]) -> list[Effect]:
        sent = _Sent(nodes, len(segments))
        effects: list[Effect] = []
        for segment in segments:
            self._ticket += 1
            self._under_way[self._ticket] = sent, int(segment.seq)
            sampling = None
            if self.samples:
                prefixes = [self._prefix[node] for node in nodes]
                paths = [self._path_of(prefix) if self._mixer.needs_path else () for prefix in prefixes]
                sampling = tuple(self._mixer.sampling(prefixes, paths, self.num_top)[0])
            effects.append(Forward(self._ticket, segment, sampling))
        return effects

    def _make_prefixes(self, nodes: Sequence[DraftNode]) -> None:
        for node in nodes:
            if node not in self._prefix:
                assert node.parent is not None
                self._prefix[node] = self._prefix[node.parent].child(node.token)

    def _path_of(self, prefix: PrefixNode) -> list[int]:
        """Output tokens down to a node at the head or below it."""
        tokens: list[int] = []
        above: PrefixNode | None = prefix
        while above is not None and above.position > len(self._output):
            tokens.append(above.token)
            above = above.parent
        return [*self._output, *reversed(tokens)]

    # ---- answers ----------------------------------------------------------------------------------------------------
    def answer(self, ticket: int, rows: Rows, scored: tuple[int, ...] | None) -> bool:
        """Take the answer to a forward. True if its segment is complete: its nodes are known, those apart that were
        dropped. An answer to nothing under way is ignored."""
        if (under_way := self._under_way.pop(ticket, None)) is None:
            return False
        sent, branch = under_way
        if not self.samples:
            rows = self._mixer.take_prefix_rows(branch, [row for row in rows if isinstance(row, Dist)])
        nodes = sent.nodes if scored is None else tuple(sent.nodes[row] for row in scored)
        if rows:
            sent.parts[branch] = sent.parts.get(branch, {}) | dict(zip(nodes, rows, strict=True))
        else:
            sent.parts.setdefault(branch, {})
        sent.missing -= 1
        if sent.missing:
            return False
        complete = sent.complete()
        self.answered += 1
        self.rows += len(sent.nodes)
        self.dropped += len(sent.nodes) - len(complete)
        for node, row in complete.items():
            if node.alive:
                node.known = True
                self._rows[node] = _KnownRow(self._prefix[node], row)
        for node in sent.nodes:
            if not node.alive:
                self._prefix.pop(node, None)
        return True

    def sample(self) -> int:
        """The token after the head, which is known."""
        node, sampling = self._tree.head, self._config.output.sampling
        rows = self._rows[node].branches
        first = rows[0]
        if isinstance(first, SampledRow):
            return first.token
        prefix = self._prefix[node]
        self._mixer.score(prefix, [row for row in rows if isinstance(row, Dist)], self._path_of(prefix))
        assert prefix.own_dist is not None
        return sample(filter_top(prefix.own_dist.whole, sampling), sampling, node.position)

    def advance(self, token: int) -> DraftNode:
        """The token is decided: the head moves on."""
        before = self._tree.head
        head = self._tree.advance(token)
        self._output.append(token)
        self._prefix.pop(before)
        self._prefix[head] = self._prefixes.advance(token)
        return head

    def pop_rows(self) -> dict[PrefixNode, tuple[Dist, ...]]:
        """Each branch's row after the nodes answered since the last call, for a drafter to learn from; the head of a
        sampled one. Forgotten here, as distributions are large."""
        found: dict[PrefixNode, tuple[Dist, ...]] = {}
        for node, known in self._rows.items():
            dists = tuple(row.top if isinstance(row, SampledRow) else row for row in known.branches)
            kept = tuple(dist for dist in dists if dist is not None)
            if kept:
                found[known.prefix] = kept
            if not node.alive:
                self._prefix.pop(node, None)
        self._rows.clear()
        return found

    def plain(self, rows: Sequence[Dist]) -> Dist:
        """The mixture of each branch's row, without any processing."""
        return self._mixer.plain(rows)
