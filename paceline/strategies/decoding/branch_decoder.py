"""The part of a machine that talks to the engine: this side's documents, one branch each, continued along a tree.

Every branch holds its prompt, the output tokens that are decided, and below them an open tree of rows for what may
come. Rows are scored by all branches and mixed with weights exp(R) (DRAGON eq. 2). One forward a branch at a time: a
sequence is never changed while one is under way. Knows nothing of the peer or of how nodes are chosen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.core.aggregation.weights import (
    decayed_evidence,
    dequantize_score,
    evidence_head,
    log_weight,
    mix,
    mix_heads,
    quantize_score,
)
from paceline.core.batching.segment import LogitsMode, Segment, SeqId
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.constraint import Mask
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.sampler import SamplingParams, apply_mask, process_logits
from paceline.strategies.base import Branch, Commit, Effect, Forward
from paceline.strategies.decoding.prefix_tree import PrefixNode

NO_COUNTS: Mapping[int, int] = {}
MAX_OPEN_ROWS = 96  # rows of one branch's open tree: an answer's memory is claimed before it begins
RESCORED = 48  # tokens of a prefix that are looked back on: what lies further back counts less than a score can say
MIN_PROB = 1e-30  # in place of a probability of 0, whose logarithm there is not


class BranchDecoder:
    """Sequences 0..n-1 of a machine. Positions count output tokens: position 0 follows the prompt."""

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        *,
        rescoring: bool = False,
        mask: Mask | None = None,
        ends: frozenset[int] = frozenset(),
        lazy: bool = False,
        heads: bool = False,
    ) -> None:
        """rescoring: scores of documents follow the text (`aggregation.evidence`). mask: what the answer is held to.
        ends: tokens that end it, needed with a mask only. lazy: a row's law is made when `law` asks for it, a parent's
        before its child's: for machines that look at few of the rows they compute. heads: nodes keep the head of the
        plain mixture, for who learns from it."""
        self.started = False  # the prompts are known
        self.room: int | None = None  # output tokens that fit the context
        self.forwards = 0  # answered ones, of all branches together
        self.rows = 0  # in them, of one branch
        self.timed: tuple[int, float] | None = None  # rows and seconds of the last forward that was no prefill
        self._sampling = sampling
        self._penalised = sampling.looks_back
        self._lazy = lazy
        self._heads = heads
        self._vocab_size = vocab_size
        self._rescoring = rescoring
        self._mask = mask
        self._ends = ends
        self._branches: tuple[Branch, ...] = ()
        self._weights: tuple[float, ...] = ()
        self._repeated: tuple[IdArray | None, ...] = ()  # ids of each prompt, where a penalty asks for them
        self._prefix: tuple[int, ...] = ()  # output tokens decided when the prompts were read
        self._rescored, self._root = 0, PrefixNode(-1, 0, None)  # how many of its last ones are looked at, and its node
        self._prefix_probs: list[list[float]] = []  # how probable each branch thought each of those that are judged
        self._committed: list[int] = []  # output tokens whose rows are there for good
        self._open: list[PrefixNode] = []  # of the open tree, in the order of their rows
        self._ticket = 0
        self._asked: dict[int, int] = {}  # ticket -> branch
        self._batch: tuple[PrefixNode, ...] = ()  # what the forward under way will score
        self._answers: dict[int, tuple[Dist, ...]] = {}  # branch -> rows of `_batch`
        self._rows: dict[PrefixNode, tuple[Dist, ...]] = {}  # each branch's, of the batch answered last
        self._harvesting = False  # the last prompt's answer will have more rows than its last
        self._harvest: tuple[Dist, ...] = ()
        self._since: float | None = None  # when it was asked for

    @property
    def log_evidence(self) -> float | None:
        """Log of the summed exp(R) of this side's documents (DRAGON 1.1), or None when it found none."""
        scores = [branch.score for branch in self._branches if branch.score is not None]
        return log_weight(scores) if scores else None

    @property
    def idle(self) -> bool:
        """No forward is under way, and there is something to continue."""
        return self.started and not self._asked

    def spare_rows(self, nodes: Sequence[PrefixNode]) -> int:
        """How many rows more the open tree may have beside these."""
        return max(0, MAX_OPEN_ROWS - len(self._open) - len(nodes))

    def fits(self, length: int) -> bool:
        """Can this side hold so many output tokens?"""
        return self.room is None or length <= self.room

    def start(
        self,
        branches: Sequence[Branch],
        prefix: Sequence[int],
        head: PrefixNode,
        room: int | None,
        *,
        harvest: int = 0,
    ) -> list[Effect]:
        """Prefill every prompt, followed by the output tokens decided so far; `head` is their node.

        harvest: laws of so many tokens of the last prompt's end, or of fewer, for `harvested`; none behind a prefix.
        """
        self.started, self.room = True, room
        self._branches = tuple(branches)
        self._weights = tuple(0.0 if branch.score is None else branch.score for branch in branches)
        penalised = self._sampling.repetition_penalty != 1.0
        self._repeated = tuple(
            np.unique(np.array(branch.prompt, dtype=np.int32)) if penalised else None for branch in branches
        )
        self._prefix = tuple(prefix)
        self._committed = list(prefix)
        head.cached = True
        self._harvesting = harvest > 0 and not prefix and bool(branches)
        self._batch, self._root = (head,), head
        self._prefix_probs = [[] for _ in branches]
        self._rescored = min(len(prefix), RESCORED) if self._rescoring else 0
        seam = len(prefix) - self._rescored
        early, late = self._prefix[:seam], self._prefix[seam:]
        effects: list[Effect] = []
        for i, branch in enumerate(branches):
            prompt = (*branch.prompt, *early)
            more = harvest if not prefix and i == len(branches) - 1 else 0
            effects.append(self._forward(i, Segment(SeqId(i), 0, prompt, None, 1 + more if more else "last")))
            if late:
                effects.append(self._forward(i, Segment(SeqId(i), len(prompt), late, None, "all")))
        return effects

    def commit_to(self, head: PrefixNode) -> list[Effect]:
        """Bring the rows to the targets: their path stays for good, what hangs below `head` stays open, the rest goes.

        Only when idle.
        """
        if not self._open:
            return []
        path: list[PrefixNode] = []
        node: PrefixNode | None = head
        while node is not None and node.position > len(self._committed):
            path.append(node)
            node = node.parent
        keep: list[PrefixNode] = []
        for node in reversed(path):
            if node.row is None:
                break
            keep.append(node)
        rest = [node for node in self._open if node.alive and node.position > head.position]
        if not keep and len(rest) == len(self._open):
            return []
        kept, stay = (tuple(node.row for node in nodes if node.row is not None) for nodes in (keep, rest))
        for node in self._open:
            node.row, node.cached = None, False
        for node in keep:
            node.cached = True
        for row, node in enumerate(rest):
            node.row, node.cached = row, True
        self._committed += [node.token for node in keep]
        self._open = rest
        return [Commit(SeqId(index), kept, stay) for index in range(len(self._branches))]

    def missing_rows(self, head: PrefixNode) -> list[PrefixNode]:
        """Decided nodes whose rows are missing, `head` included. After `settle`."""
        nodes: list[PrefixNode] = []
        node: PrefixNode | None = head
        while node is not None and node.position > len(self._committed):
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def append_rows(self, nodes: Sequence[PrefixNode], head: PrefixNode, now: float) -> list[Effect]:
        """Append rows, parents first. Decided ones alone are a chain, scored at its end only. After `settle`."""
        start = len(self._committed) + len(self._open)
        tokens = tuple(node.token for node in nodes)
        parents: tuple[int, ...] | None = None
        if nodes[-1].position <= head.position and not self._open:
            self._committed += tokens
            self._batch = tuple(nodes) if self._rescoring else (nodes[-1],)
        else:
            for node in nodes:
                node.row = len(self._open)
                self._open.append(node)
            parents = tuple(_row_above(node) for node in self._open)
            self._batch = tuple(nodes)
        for node in nodes:
            node.cached = True
        self._since = now
        wanted: LogitsMode = "last" if len(self._batch) == 1 and parents is None else "all"
        return [
            self._forward(i, Segment(SeqId(i), len(branch.prompt) + start, tokens, parents, wanted))
            for i, branch in enumerate(self._branches)
        ]

    def scored(self, ticket: int, dists: Sequence[Dist], now: float) -> Sequence[PrefixNode]:
        """A forward has been answered. Once all branches have: the nodes that are scored by it."""
        branch = self._asked.pop(ticket, None)
        if branch is None:
            return ()
        rows = self._add_prefix_probs(branch, dists)
        if self._harvesting and branch == len(self._branches) - 1:
            self._harvest, rows, self._harvesting = tuple(rows[:-1]), rows[-1:], False
        self._answers[branch] = (*self._answers.get(branch, ()), *rows)
        if self._asked:
            return ()
        answers = [self._answers[index] for index in range(len(self._branches))]
        self._rows = dict(zip(self._batch, zip(*answers, strict=True), strict=True))
        self._answers.clear()
        if not self._lazy:
            for node in self._batch:
                self._look(node)
            self._rows.clear()
        self.forwards += 1
        self.rows += len(self._batch)
        self.timed = None if self._since is None else (len(self._batch), now - self._since)
        return self._batch

    def dist(self, node: PrefixNode) -> Dist | None:
        """This side's law after a node's prefix; None where its row has not been computed."""
        if node.own_dist is None and node.alive and node in self._rows:
            self._look(node)
        return node.own_dist

    def pop_branch_dists(self) -> dict[PrefixNode, tuple[Dist, ...]]:
        """What each branch said after each node answered last. Once: it is forgotten here, as laws are large."""
        rows, self._rows = self._rows, {}
        return rows

    def prompt_dists(self) -> tuple[Sequence[int], Sequence[Dist]]:
        """Tokens of the last prompt's end, all but its very last, and the laws after them. Once."""
        laws, self._harvest = self._harvest, ()
        tokens = self._branches[-1].prompt[-1 - len(laws) : -1] if laws else ()
        return tokens, [law.within(self._vocab_size) for law in laws]

    def plain(self, dists: Sequence[Dist]) -> Dist:
        """The mixture of what the branches said, nothing else done to it."""
        return mix(dists, self._weights).within(self._vocab_size)

    def _look(self, node: PrefixNode) -> None:
        """A node that was answered last."""
        if node.alive or (self._rescoring and not node.dead):
            rows = [row.within(self._vocab_size) for row in self._rows[node]]
            laws = self._masked(self._path(node), rows)
            if self._rescoring:
                self._rescore(node, laws)
            if node.alive:
                node.own_dist = self._mixed(node, laws)
                if self._heads:
                    node.raw_head = mix_heads(rows, self._weights, NUM_SUCCESSORS)

    def _mixed(self, node: PrefixNode, laws: Sequence[Dist]) -> Dist:
        counts = Counter(self._path(node)) if self._penalised else NO_COUNTS
        merits = node.evidence or (0.0,) * len(laws)
        weights = [weight + merit for weight, merit in zip(self._weights, merits, strict=True)]
        prompts = zip(laws, self._repeated, strict=True)
        return mix([process_logits(law, self._sampling, counts, prompt) for law, prompt in prompts], weights)

    def _masked(self, path: Sequence[int], laws: Sequence[Dist]) -> Sequence[Dist]:
        """Laws after a path, each held to the constraint."""
        allowed = None if self._mask is None else self._mask.allowed(path)
        if allowed is None:
            return laws
        if not allowed[: self._vocab_size].any():
            # No text goes through here: a draft that breaks the constraint, or one the mask could not follow.
            return [self._end(law) for law in laws]
        return [apply_mask(law, allowed) for law in laws]

    def _end(self, dist: Dist) -> Dist:
        """All mass on the tokens that end an answer."""
        probs = np.zeros(len(dist.ids))
        probs[[end for end in self._ends if end < len(probs)]] = 1.0
        return Dist.dense(probs / probs.sum()) if probs.any() else dist

    def _add_prefix_probs(self, branch: int, dists: Sequence[Dist]) -> Sequence[Dist]:
        """Of the rows of the prefix, which come first, keep only how probable they made the token that followed.

        As soon as they come, branch by branch: all their laws together would be gigabytes.
        """
        if not self._rescored:
            return dists
        known = self._prefix_probs[branch]
        more = dists[: self._rescored - len(known)]
        for place, dist in enumerate(more, len(self._prefix) - self._rescored + len(known)):
            (law,) = self._masked(self._prefix[:place], (dist.within(self._vocab_size),))
            known.append(law.prob(self._prefix[place]))
        return dists[len(more) :]

    def _rescore(self, node: PrefixNode, laws: Sequence[Dist]) -> None:
        """How well each document has foretold the text up to this node, parents first. laws: of this node, unwarped."""
        above = node.parent
        if node.evidence is None:
            if node is self._root:  # there may be nodes above it: targets that came before the prompts
                merits = [0.0] * len(laws)
                for probs in zip(*self._prefix_probs, strict=True):
                    merits = _rescored(merits, probs)
            else:
                assert above is not None and above.evidence is not None and above.branch_dists, (
                    "scored after the one above it"
                )
                merits = _rescored(above.evidence, [law.prob(node.token) for law in above.branch_dists])
            node.evidence = tuple(merits)
        node.branch_dists = tuple(map(evidence_head, laws))
        if above is not None and not above.alive:
            above.branch_dists = ()
        scores = [
            branch.score + merit
            for branch, merit in zip(self._branches, node.evidence, strict=True)
            if branch.score is not None
        ]
        node.log_evidence = dequantize_score(quantize_score(log_weight(scores))) if scores else None

    def _path(self, node: PrefixNode) -> list[int]:
        """The output tokens from the answer's beginning; none where nobody asks for them."""
        if self._mask is None and not self._penalised:
            return []
        tokens: list[int] = []
        above: PrefixNode | None = node
        while above is not None and above.position > len(self._committed):
            tokens.append(above.token)
            above = above.parent
        return [*self._committed[: node.position], *reversed(tokens)]

    def _forward(self, index: int, segment: Segment) -> Forward:
        self._ticket += 1
        self._asked[self._ticket] = index
        return Forward(self._ticket, segment)


def _rescored(merits: Sequence[float], probs: Sequence[float]) -> list[float]:
    """After one more token, which each branch thought that probable."""
    return [decayed_evidence(merit, math.log(max(prob, MIN_PROB))) for merit, prob in zip(merits, probs, strict=True)]


def _row_above(node: PrefixNode) -> int:
    """The row of the node's parent in the open tree; -1 where that is decided."""
    return -1 if node.parent is None or node.parent.row is None else node.parent.row
