"""The part of a machine that talks to the engine: this side's documents, one branch each, continued along a tree.

Every branch holds its prompt, the output tokens that are decided, and below them an open tree of rows for what may
come. Rows are scored by all branches and mixed (`rescoring`). One forward a branch at a time: a sequence is never
changed while one is under way. Knows nothing of the peer or of how nodes are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from paceline.core.aggregation.weights import log_weight
from paceline.core.batching.segment import ROOT, LogitsMode, Segment, SeqId
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import NOT_SAMPLED, RowSampling, SampledRow
from paceline.core.sampling.sampler import SamplingParams, filter_top, sample
from paceline.strategies.base import Branch, Effect, Forward, OutputRules, Prune, Sampled, Scored
from paceline.strategies.decoding.prefix_tree import PrefixNode
from paceline.strategies.decoding.rescoring import BranchMixer

# Rows of the forward answered last: each branch's distributions, or the tokens that the engine has sampled.


class AnsweredRows:
    """Store of one decoder. Keeps rows until the next answer, or until they are taken: distributions are large."""

    def __init__(self) -> None:
        self.dists: dict[PrefixNode, tuple[Dist, ...]] = {}  # each branch's row after a node
        self.sampled: dict[PrefixNode, SampledRow] = {}
        self._parts: dict[int, tuple[Dist, ...]] = {}  # branch -> rows of the batch that is being answered
        self._prompt: tuple[Dist, ...] = ()
        self._prompt_of: int | None = None  # branch whose first answer has more rows than its last

    def expect_prompt(self, branch: int) -> None:
        """The next answer of this branch begins with rows of its prompt's end."""
        self._prompt_of = branch

    def add(self, branch: int, dists: Sequence[Dist]) -> None:
        """Rows of one branch."""
        if branch == self._prompt_of:
            self._prompt, dists, self._prompt_of = tuple(dists[:-1]), dists[-1:], None
        self._parts[branch] = (*self._parts.get(branch, ()), *dists)

    def complete(self, nodes: Sequence[PrefixNode]) -> None:
        """Every branch has answered: the rows after these nodes are known."""
        parts = [self._parts[branch] for branch in range(len(self._parts))]
        self.dists = dict(zip(nodes, zip(*parts, strict=True), strict=True))
        self._parts.clear()

    def add_sampled(self, nodes: Sequence[PrefixNode], rows: Sequence[SampledRow]) -> None:
        """The tokens after these nodes, of the only branch."""
        if self._prompt_of is not None:
            self._prompt = tuple(row.top for row in rows[:-1] if row.top is not None)
            rows, self._prompt_of = rows[-1:], None
        self.sampled = {node: row for node, row in zip(nodes, rows, strict=True) if row is not NOT_SAMPLED}

    def pop(self) -> dict[PrefixNode, tuple[Dist, ...]]:
        """Each branch's row after each node; the head of a sampled one."""
        dists, self.dists = self.dists, {}
        sampled, self.sampled = self.sampled, {}
        return dists | {node: (row.top,) for node, row in sampled.items() if row.top is not None}

    def pop_prompt(self) -> tuple[Dist, ...]:
        """Rows of the prompt's end, all but its very last."""
        rows, self._prompt = self._prompt, ()
        return rows


_GREEDY = SamplingParams(temperature=0.0)
MAX_OPEN_ROWS = 96  # rows of one branch's open tree: an answer's memory is claimed before it begins


class BranchDecoder:
    """Sequences 0..n-1 of a machine. Positions count output tokens: position 0 follows the prompt."""

    def __init__(
        self,
        output: OutputRules,
        *,
        rescoring: bool = False,
        lazy: bool = False,
        keep_heads: bool = False,
        keep_plain: bool = False,
        samples: bool = False,
        heads: bool = False,
    ) -> None:
        """rescoring: scores of documents follow the text. lazy: few rows are used: distributions are made of the nodes
        that `dist` is called with, parents first, and tokens sampled of those that they lead to. keep_heads: nodes keep
        the plain mixture's head (`raw_head`). keep_plain: the whole of it, of rows that come as distributions
        (`plain`). samples: the engine mixes the branches and samples each row's token (`sampled`); without a prefix
        only. heads: with `samples`, nodes get the rows' heads, and their distributions are read on demand; `sample` is
        not called.
        """
        self.started = False  # the prompts are known
        self.max_new_tokens: int | None = None  # output tokens that fit the context
        self.log_evidence: float | None = None  # log h of this side's documents (DRAGON); None: it found none
        self.forwards = 0  # answered ones, of all branches together
        self.rows = 0  # in them, of one branch
        self.timed: tuple[int, float] | None = None  # rows and seconds of the last forward that was no prefill
        self.num_top = NUM_SUCCESSORS if keep_heads else 0  # ids of the head of each row that is sampled from now on
        self._mixer = BranchMixer(output, rescoring=rescoring, keep_heads=keep_heads, keep_plain=keep_plain)
        self._samples, self._heads = samples, heads
        self._sampling, self._vocab_size = output.sampling, output.vocab_size
        self._lazy = lazy
        self._branches: tuple[Branch, ...] = ()
        self._committed: list[int] = []  # output tokens whose rows are there for good
        self._open: list[PrefixNode] = []  # nodes of the open tree, in the order of their rows
        self._next_id = 0  # of the next row
        self._ticket = 0
        self._pending: dict[int, int] = {}  # under way: ticket -> branch
        self._batch: tuple[PrefixNode, ...] = ()  # nodes that the forward under way will score
        self._answered = AnsweredRows()
        self._asked_at: float | None = None  # when the forward under way was asked for; None: the prefill

    @property
    def idle(self) -> bool:
        """No forward is under way, and there is something to continue."""
        return self.started and not self._pending

    @property
    def decided_by(self) -> frozenset[int] | None:
        """The branches that decided the token that `sample` returned last; None: all alike, or it is not known."""
        return self._mixer.decided_by

    def spare_rows(self, nodes: Sequence[PrefixNode]) -> int:
        """Rows that the open tree may have beside these."""
        return max(0, MAX_OPEN_ROWS - len(self._open) - len(nodes))

    def fits(self, length: int) -> bool:
        """The context of this side holds so many output tokens."""
        return self.max_new_tokens is None or length <= self.max_new_tokens

    def start(
        self,
        branches: Sequence[Branch],
        prefix: Sequence[int],
        head: PrefixNode,
        max_new_tokens: int | None,
        *,
        num_prompt_dists: int = 0,
    ) -> list[Effect]:
        """Prefill every prompt, followed by the output tokens decided so far; `head` is their node.

        num_prompt_dists: maximum of rows of the last prompt's end to score for `prompt_dists`; unused with a prefix.
        """
        self.started, self.max_new_tokens = True, max_new_tokens
        assert self._heads or not (self._samples and prefix), "a prefix's rows are read as distributions"
        self._branches = tuple(branches)
        scores = [branch.score for branch in branches if branch.score is not None]
        self.log_evidence = log_weight(scores) if scores else None
        self._committed = list(prefix)
        head.cached = True
        if num_prompt_dists > 0 and not prefix and bool(branches):
            self._answered.expect_prompt(len(branches) - 1)
        self._batch = (head,)
        self._mixer.start(self._branches, tuple(prefix), head)
        more = 0 if prefix or not branches else min(num_prompt_dists, len(branches[-1].prompt) - 1)
        segments = prompt_segments(branches, tuple(prefix), self._mixer.num_prefix_rows, more)
        return self._forwards(segments, more, sampled=self._samples and not prefix)

    def commit_to(self, head: PrefixNode) -> list[Effect]:
        """Commit the rows on the path to `head`, keep those below it open, and drop the others. Only when idle."""
        if not self._open:
            return []
        keep: list[PrefixNode] = []
        for node in self.missing_rows(head):
            if node.row is None:
                break
            keep.append(node)
        rest = [node for node in self._open if node.alive and node.position > head.position]
        if not keep and len(rest) == len(self._open):
            return []
        kept, live = (tuple(node.row for node in nodes if node.row is not None) for nodes in (keep, rest))
        for node in set(self._open).difference(keep, rest):
            node.row, node.cached = None, False
        for node in keep:
            node.row = None
        self._committed += [node.token for node in keep]
        self._open = rest
        return [Prune(SeqId(index), kept, live) for index in range(len(self._branches))]

    def missing_rows(self, head: PrefixNode) -> list[PrefixNode]:
        """Decided nodes whose rows are not committed, `head` included. After `commit_to`: those without a row."""
        return _path_below(head, len(self._committed))

    def admitted(self, head: PrefixNode, drafts: Sequence[PrefixNode]) -> list[PrefixNode]:
        """Those of the drafts below `head`, parents first, that the constraint allows, in their order."""
        return self._mixer.admitted(head, drafts, self._path, leaves=self._samples)

    def append_rows(self, nodes: Sequence[PrefixNode], head: PrefixNode, now: float) -> list[Effect]:
        """Append rows, parents first. An open tree must have been committed with `commit_to`.

        Rows of decided nodes alone are a chain; without rescoring only its last row is scored.
        """
        start = len(self._committed) + len(self._open)
        tokens = tuple(node.token for node in nodes)
        parents: tuple[int, ...] | None = None
        ids: tuple[int, ...] | None = None
        if nodes[-1].position <= head.position and not self._open:
            self._committed += tokens
            self._batch = tuple(nodes) if self._mixer.rescoring else (nodes[-1],)
        else:
            ids = tuple(range(self._next_id, self._next_id + len(nodes)))
            self._next_id += len(nodes)
            for node, name in zip(nodes, ids, strict=True):
                node.row = name
            parents = tuple(_parent_row(node) for node in nodes)
            self._open += nodes
            self._batch = tuple(nodes)
        for node in nodes:
            node.cached = True
        self._asked_at = now
        wanted: LogitsMode = "last" if len(self._batch) == 1 and parents is None else "all"
        return self._forwards(
            [
                Segment(SeqId(i), len(branch.prompt) + start, tokens, parents, wanted, ids)
                for i, branch in enumerate(self._branches)
            ],
            sampled=self._samples,
        )

    def sampled(self, ticket: int, rows: Sequence[SampledRow], now: float) -> Sequence[PrefixNode]:
        """Take the answer to a forward whose rows the engine samples: the nodes that have a token now."""
        if self._pending.pop(ticket, None) is None:
            return ()
        if self._heads:
            for node, row in zip(self._batch, rows, strict=True):
                if node.alive or not node.dead:
                    self._mixer.take(node, row, partial(self._path_for_mixing, node))
        else:
            self._answered.add_sampled(self._batch, rows)
        self._record_forward(now)
        return self._batch

    def _record_forward(self, now: float) -> None:
        self.forwards += 1
        self.rows += len(self._batch)
        self.timed = None if self._asked_at is None else (len(self._batch), now - self._asked_at)

    def scored(self, ticket: int, dists: Sequence[Dist], now: float) -> Sequence[PrefixNode]:
        """Take the answer to a forward. Once all branches have answered: the nodes that are scored by it."""
        branch = self._pending.pop(ticket, None)
        if branch is None:
            return ()
        self._answered.add(branch, self._mixer.take_prefix_rows(branch, dists))
        if self._pending:
            return ()
        self._answered.complete(self._batch)
        if not self._lazy:
            for node in self._batch:
                self._score(node)
            self._answered.pop()
        self._record_forward(now)
        return self._batch

    def sample(self, node: PrefixNode) -> int | None:
        """The token after a node's prefix; None where the row has not been computed. Called once for each token, in
        order."""
        if self._samples:
            row = self._answered.sampled.get(node)
            if row is None:
                return None
            self._mixer.decide(row)
            return row.token
        dist = self.dist(node)
        return None if dist is None else sample(filter_top(dist, self._sampling), self._sampling, node.position)

    def dist(self, node: PrefixNode) -> Dist | None:
        """This side's distribution after a node's prefix; None where its row has not been computed."""
        if node.own_dist is None and node.alive and node in self._answered.dists:
            self._score(node)
        return None if node.own_dist is None else node.own_dist.whole

    def pop_branch_dists(self) -> dict[PrefixNode, tuple[Dist, ...]]:
        """Each branch's row after each node answered last; its head, where the engine samples. Forgotten here, as
        distributions are large."""
        return self._answered.pop()

    def prompt_dists(self) -> tuple[Sequence[int], Sequence[Dist]]:
        """Tokens of the last prompt's end, all but its very last, and the distributions after them. Forgotten here."""
        rows = self._answered.pop_prompt()
        tokens = self._branches[-1].prompt[-1 - len(rows) : -1] if rows else ()
        return tokens, [row.within(self._vocab_size) for row in rows]

    def plain(self, rows: Sequence[Dist]) -> Dist:
        """The mixture of each branch's row, without any processing."""
        return self._mixer.plain(rows)

    def _score(self, node: PrefixNode) -> None:
        """Set the distribution of a node that was answered last."""
        if node.alive or (self._mixer.rescoring and not node.dead):
            self._mixer.score(node, self._answered.dists[node], self._path_for_mixing(node))

    def _path_for_mixing(self, node: PrefixNode) -> Sequence[int]:
        return self._path(node) if self._mixer.needs_path else ()

    def _path(self, node: PrefixNode) -> list[int]:
        return output_to(node, self._committed)

    def _forwards(self, segments: Sequence[Segment], num_prompt_rows: int = 0, *, sampled: bool) -> list[Effect]:
        """num_prompt_rows: wanted rows of the last prompt's end, before the node's. sampled: by the engine."""
        if sampled:
            self._ticket += 1
            self._pending[self._ticket] = 0
            paths = list(map(self._path, self._batch)) if self._mixer.needs_path else [()] * len(self._batch)
            sampling, mixture = self._mixer.sampling(self._batch, paths, self.num_top, heads=self._heads)
            heads = [RowSampling(_GREEDY, 0, self._vocab_size, num_top=self.num_top)] * num_prompt_rows
            path_only = self._lazy and self._batch[0].alive and segments[0].parents is not None and not self.num_top
            return [Forward(self._ticket, segments[0], (*heads, *sampling), tuple(segments[1:]), mixture, path_only)]
        effects: list[Effect] = []
        for segment in segments:
            self._ticket += 1
            self._pending[self._ticket] = segment.seq
            effects.append(Forward(self._ticket, segment))
        return effects


def output_to(node: PrefixNode, committed: Sequence[int]) -> list[int]:
    """The output tokens from the answer's beginning to this node."""
    return [*committed[: node.position], *(each.token for each in _path_below(node, len(committed)))]


def _path_below(node: PrefixNode, length: int) -> list[PrefixNode]:
    """The nodes from the prefix of so many output tokens to this one, which is the last."""
    nodes: list[PrefixNode] = []
    above: PrefixNode | None = node
    while above is not None and above.position > length:
        nodes.append(above)
        above = above.parent
    return nodes[::-1]


def prompt_segments(
    branches: Sequence[Branch], prefix: tuple[int, ...], num_prefix_rows: int, num_prompt_rows: int
) -> list[Segment]:
    """Every prompt with the prefix behind it. num_prefix_rows: of its end, wanted in a segment of their own.
    num_prompt_rows: wanted of the last prompt's end, besides its very last."""
    seam = len(prefix) - num_prefix_rows
    segments: list[Segment] = []
    for index, branch in enumerate(branches):
        prompt = (*branch.prompt, *prefix[:seam])
        is_last = index == len(branches) - 1
        wanted: LogitsMode = 1 + num_prompt_rows if is_last and num_prompt_rows else "last"
        segments.append(Segment(SeqId(index), 0, prompt, None, wanted))
        if num_prefix_rows:
            segments.append(Segment(SeqId(index), len(prompt), prefix[seam:], None, "all"))
    return segments


def _parent_row(node: PrefixNode) -> int:
    """The id of the row of the node's parent in the open tree; `ROOT` where that is decided."""
    return ROOT if node.parent is None or node.parent.row is None else node.parent.row


def take_answer(decoder: BranchDecoder, answer: Scored | Sampled, now: float) -> Sequence[PrefixNode]:
    """Take the answer to a forward, of whichever kind it asked for: the nodes that are complete by it."""
    if isinstance(answer, Scored):
        return decoder.scored(answer.ticket, answer.dists, now)
    return decoder.sampled(answer.ticket, answer.rows, now)
