"""The part of a machine that talks to the engine: this side's documents, one branch each, continued along a tree.

Every branch holds its prompt, the output tokens that are decided, and below them an open tree of rows for what may
come. Rows are scored by all branches and mixed (`BranchMixer`). One forward a branch is under way, and no sequence is
changed meanwhile; or several, on an engine in stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.aggregation.weights import (
    BranchMixture,
    Evidence,
    deciders,
    evidence_after,
    evidence_head,
    log_weight,
    mix,
    mix_heads,
    mix_processed,
    rescored_log_weight,
    row_log_weights,
)
from paceline.core.batching.segment import ROOT, GoesOn, LogitsMode, Segment, SeqId
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.sampler import (
    NOT_SAMPLED,
    RowSampling,
    SampledRow,
    SamplingParams,
    apply_mask,
    filter_top,
    sample,
    set_ranking,
)
from paceline.strategies.base import Branch, Effect, Forward, OutputRules, Prune, Sampled, Scored
from paceline.strategies.decoding.prefix_tree import PrefixNode

AllowedIds = NDArray[np.bool_] | None  # a mask; None: all ids
NO_COUNTS: Mapping[int, int] = {}
RESCORED_TOKENS = 48  # of a prefix, at its end: what lies further back adds less than the quantization of a score


class BranchMixer:
    """From the rows of an answer's branches to one distribution: constraint, document scores, penalties, mixture.

    Branches are mixed with weights exp(R) (DRAGON eq. 2). With rescoring, R follows the text: what each branch
    predicted of it is evidence for or against its document (`core.aggregation.weights.decayed_evidence`), kept per
    node, so that nothing is rolled back. A node is scored after its parent.
    """

    def __init__(
        self,
        output: OutputRules,
        *,
        rescoring: bool,
        keep_heads: bool,
        keep_plain: bool = False,
    ) -> None:
        self.num_prefix_rows = 0  # tokens at the prefix's end that are rescored; `take_prefix_rows` takes their rows
        self.needs_path = output.mask is not None or output.sampling.looks_back  # `score` needs the tokens before a row
        self.rescoring = rescoring
        self.decided_by: frozenset[int] | None = None  # branches that decided the token decided last, where not all
        self._sampling, self._vocab_size = output.sampling, output.vocab_size
        self._penalised = output.sampling.looks_back
        self._mask, self._eos_ids = output.mask, output.eos_ids
        self._keep_heads, self._keep_plain = keep_heads, keep_plain
        self._branches: tuple[Branch, ...] = ()
        self._weights: tuple[float, ...] = ()  # R of each branch, 0 without a document
        self._prompt_ids: tuple[IdArray | None, ...] = ()  # ids of each prompt, where a penalty needs them
        self._known_masks: dict[PrefixNode, AllowedIds] = {}  # of the nodes admitted last
        self._prefix: tuple[int, ...] = ()  # output tokens decided when the prompts were read
        self._root = PrefixNode(-1, 0, None)  # node of the prefix
        self._decided_evidence: Evidence = ()  # after the decided tokens, where the engine samples
        self._prefix_probs: list[list[float]] = []  # of each branch: probability of each of those last tokens

    def start(self, branches: tuple[Branch, ...], prefix: tuple[int, ...], root: PrefixNode) -> None:
        """Set the branches, and the output tokens decided so far, whose node is `root`."""
        self._decided_evidence = (0.0,) * len(branches)
        self._branches = branches
        self._weights = tuple(0.0 if branch.score is None else branch.score for branch in branches)
        penalised = self._sampling.repetition_penalty != 1.0
        self._prompt_ids = tuple(
            np.unique(np.array(branch.prompt, dtype=np.int32)) if penalised else None for branch in branches
        )
        self._prefix, self._root = prefix, root
        self._prefix_probs = [[] for _ in branches]
        self.num_prefix_rows = min(len(prefix), RESCORED_TOKENS) if self.rescoring else 0

    def take_prefix_rows(self, branch: int, dists: Sequence[Dist]) -> Sequence[Dist]:
        """Reduce the rows of the prefix, which come first, to probabilities of the tokens that followed; the rest.

        Called as soon as they come, branch by branch: all their distributions together would be gigabytes.
        """
        if not self.num_prefix_rows:
            return dists
        probs = self._prefix_probs[branch]
        rows = dists[: self.num_prefix_rows - len(probs)]
        first = len(self._prefix) - self.num_prefix_rows + len(probs)
        masks = self._masks([partial(self._allowed, self._prefix[: first + row]) for row in range(len(rows))])
        for position, (row, mask) in enumerate(zip(rows, masks, strict=True), first):
            probs.append(apply_mask(row.within(self._vocab_size), mask).prob(self._prefix[position]))
        return dists[len(rows) :]

    def score(self, node: PrefixNode, rows: Sequence[Dist], path: Sequence[int]) -> None:
        """Set a node's distribution from each branch's row. path: its output tokens; empty unless `needs_path`."""
        rows = [row.within(self._vocab_size) for row in rows]
        mask = self._allowed_after(node, path)
        dists = [apply_mask(row, mask) for row in rows]
        if self.rescoring:
            self._set_evidence(node, tuple(map(evidence_head, dists)))
        if node.alive:
            node.own_dist = OwnDist.of(self._mixed(node, dists, path))
            if self._keep_plain:
                node.plain = mix(rows, self._row_weights(node))
            if self._keep_heads:
                node.raw_head = mix_heads(rows, self._weights, NUM_SUCCESSORS)

    def sampling(
        self, nodes: Sequence[PrefixNode], paths: Sequence[Sequence[int]], num_top: int, *, heads: bool = False
    ) -> tuple[list[RowSampling], BranchMixture | None]:
        """How the engine samples the rows of these nodes, parents first.

        paths: as of `score`. heads: rows are answered for `take`; else the first one continues what is decided, and the
        others hang below it.
        """
        alone = len(self._branches) == 1 and not heads
        masks = self._masks([partial(self._allowed_after, *each) for each in zip(nodes, paths, strict=True)])
        rows = [
            RowSampling(
                self._sampling,
                node.position,
                self._vocab_size,
                Counter(path) if self._penalised else NO_COUNTS,
                self._prompt_ids[0] if alone else None,
                mask,
                num_top,
            )
            for node, path, mask in zip(nodes, paths, masks, strict=True)
        ]
        if alone:
            return rows, None
        index = {node: row for row, node in enumerate(nodes)}
        parents = tuple(-1 if node.parent is None else index.get(node.parent, -1) for node in nodes)
        tokens = tuple(node.token for node in nodes)
        if heads and self.rescoring:
            for node, parent in zip(nodes, parents, strict=True):
                if parent < 0:
                    node.evidence = self._evidence(node)
        evidence = tuple(node.evidence or self._decided_evidence for node in nodes)
        return rows, BranchMixture(self._weights, evidence, self.rescoring, parents, tokens, self._prompt_ids, heads)

    def take(self, node: PrefixNode, row: SampledRow, path: Callable[[], Sequence[int]]) -> None:
        """Set what is known of a node from the engine's head of its row. path: called as `OwnDist.whole` is, for what
        `score` takes."""
        if self.rescoring:
            self._set_evidence(node, row.branch_heads)
        if not node.alive:
            return
        node.raw_head = row.top
        node.sampled, node.decided_by = row.token, self._deciders(row, self._evidence(node))
        dists = row.dists
        assert dists is not None, "asked for with heads"

        def read() -> Dist:
            known = path()
            mask = self._allowed(known)
            return self._mixed(node, [apply_mask(dist.within(self._vocab_size), mask) for dist in dists()], known)

        if row.head is None:
            node.own_dist = OwnDist.of(read())
        else:
            set_ranking(row.head.dist, self._sampling, node.position, row.head.best)
            node.own_dist = OwnDist(row.head, row.token, read)

    def admitted(
        self,
        head: PrefixNode,
        drafts: Sequence[PrefixNode],
        path_of: Callable[[PrefixNode], Sequence[int]],
        *,
        leaves: bool,
    ) -> list[PrefixNode]:
        """Those of the drafts below `head`, parents first, that the constraint allows, in their order.

        Their masks are kept until the next call, with `leaves` also those of drafts that none follows. Depth first,
        because a mask takes longer after one of another branch.
        """
        self._known_masks = {}
        if self._mask is None or not drafts:
            return list(drafts)
        below: dict[PrefixNode, list[PrefixNode]] = {}
        for node in drafts:
            assert node.parent is not None
            below.setdefault(node.parent, []).append(node)
        kept: set[PrefixNode] = set()
        waiting = [node for node in below if node is not head and node not in drafts]  # drafted and admitted before
        waiting.append(head)

        def walk() -> None:
            while waiting:
                node = waiting.pop()
                if node in below or leaves:
                    mask = self._known_masks[node] = self._allowed(path_of(node))
                    allowed = [child for child in below.get(node, ()) if mask is None or mask[child.token]]
                    kept.update(allowed)
                    waiting.extend(reversed(allowed))

        self._mask.at_once(walk)
        return [node for node in drafts if node in kept]

    def decide(self, row: SampledRow) -> None:
        """The row's token was decided: what the engine samples next continues it."""
        self.decided_by = self._deciders(row, self._decided_evidence)
        if self.rescoring and row.branch_probs:
            self._decided_evidence = evidence_after(self._decided_evidence, row.branch_probs)

    def _deciders(self, row: SampledRow, evidence: Evidence) -> frozenset[int] | None:
        """The branches that decided a row's token. evidence: after the row's prefix."""
        return deciders(row_log_weights(self._weights, evidence), row.branch_probs) if row.branch_probs else None

    def plain(self, rows: Sequence[Dist]) -> Dist:
        """The mixture of each branch's row, without any processing; a head that the engine has mixed as it is."""
        return (rows[0] if len(rows) == 1 else mix(rows, self._weights)).within(self._vocab_size)

    def _mixed(self, node: PrefixNode, dists: Sequence[Dist], path: Sequence[int]) -> Dist:
        counts = Counter(path) if self._penalised else NO_COUNTS
        return mix_processed(dists, self._sampling, counts, self._prompt_ids, self._row_weights(node))

    def _row_weights(self, node: PrefixNode) -> Sequence[float]:
        return self._weights if node.evidence is None else row_log_weights(self._weights, node.evidence)

    def _masks(self, wanted: Sequence[Callable[[], AllowedIds]]) -> list[AllowedIds]:
        if self._mask is None:
            return [None] * len(wanted)
        return self._mask.at_once(lambda: [each() for each in wanted])

    def _allowed_after(self, node: PrefixNode, path: Sequence[int]) -> AllowedIds:
        return self._known_masks[node] if node in self._known_masks else self._allowed(path)

    def _allowed(self, path: Sequence[int]) -> AllowedIds:
        """Tokens that the constraint allows after a path, at least one; None: all."""
        allowed = None if self._mask is None else self._mask.allowed(path)
        if allowed is None or allowed[: self._vocab_size].any():
            return allowed
        # No text goes through here: a draft that breaks the constraint, or one the mask could not follow.
        ends = np.zeros(self._vocab_size, dtype=np.bool_)
        ends[[token for token in self._eos_ids if token < self._vocab_size]] = True
        return ends if ends.any() else None

    def _set_evidence(self, node: PrefixNode, heads: Sequence[Dist]) -> None:
        """Set the evidence for each document from the text up to this node. heads: `evidence_head` of the branches'
        distributions after it, before processing."""
        parent = node.parent
        node.evidence = self._evidence(node)
        node.branch_dists = tuple(heads)
        if parent is not None and not parent.alive:
            parent.branch_dists = ()
        if self._branches[0].score is not None:  # this side has documents
            node.weigh = self._weigh

    def _weigh(self, node: PrefixNode) -> float:
        return rescored_log_weight(self._row_weights(node), node.branch_dists)

    def _evidence(self, node: PrefixNode) -> Evidence:
        """What the text up to this node adds to each document's score."""
        if node.evidence is not None:
            return node.evidence
        evidence: Evidence = (0.0,) * len(self._branches)
        if not self.rescoring:
            return evidence
        if node is self._root:  # there may be nodes above it: targets that came before the prompts
            for probs in zip(*self._prefix_probs, strict=True):
                evidence = evidence_after(evidence, probs)
            return evidence
        parent = node.parent
        assert parent is not None and parent.evidence is not None and parent.branch_dists, "scored after its parent"
        return evidence_after(parent.evidence, [dist.prob(node.token) for dist in parent.branch_dists])


def log_h_of(branches: Sequence[Branch]) -> float | None:
    """log h of a side's documents (DRAGON); None: it found none."""
    scores = [branch.score for branch in branches if branch.score is not None]
    return log_weight(scores) if scores else None


_GREEDY = SamplingParams(temperature=0.0)
MAX_OPEN_ROWS = 96  # rows of one branch's open tree: an answer's memory is claimed before it begins


@dataclass(slots=True, eq=False)
class _Batch:
    """A forward of every branch that is under way."""

    nodes: tuple[PrefixNode, ...]  # that it scores
    asked_at: float | None  # s; None: the prefill
    missing: int = 0  # answers
    parts: dict[int, dict[PrefixNode, Dist]] = field(default_factory=dict)  # by branch, what has come


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
        several: bool = False,
    ) -> None:
        """rescoring: scores of documents follow the text. lazy: few rows are used: distributions are made of the nodes
        that `dist` is called with, parents first, and tokens sampled of those that they lead to. keep_heads: nodes keep
        the plain mixture's head (`raw_head`). keep_plain: the whole of it, of rows that come as distributions
        (`plain`). samples: the engine mixes the branches and samples each row's token (`sampled`); without a prefix
        only. heads: with `samples`, nodes get the rows' heads, and their distributions are read on demand; `sample` is
        not called. several: forwards are under way at once. A row then stays open until its
        node has been passed, and what is under way may be pruned; the engine samples for a single branch alone, because
        what documents weigh follows from rows that are still under way.
        """
        self.started = False  # the prompts are known
        self.max_new_tokens: int | None = None  # output tokens that fit the context
        self.log_evidence: float | None = None  # of this side's branches, see `log_h_of`; None: no documents
        self.forwards = 0  # answered ones, of all branches together
        self.rows = 0  # in them, of one branch
        self.dropped = 0  # of these: rows that a prune dropped before they were scored
        self.timed: tuple[int, float] | None = None  # rows and seconds of the last forward that was no prefill
        self.goes_on: GoesOn | None = None  # of the next forwards, see `Forward`
        self.num_top = NUM_SUCCESSORS if keep_heads else 0  # ids of the head of each row that is sampled from now on
        self.mixer = BranchMixer(output, rescoring=rescoring, keep_heads=keep_heads, keep_plain=keep_plain)
        self._samples, self._heads, self._several = samples, heads, several
        self._sampling, self._vocab_size = output.sampling, output.vocab_size
        self._lazy = lazy
        self._branches: tuple[Branch, ...] = ()
        self._committed: list[int] = []  # output tokens whose rows are there for good
        self._open: list[PrefixNode] = []  # nodes of the open tree, in the order of their rows
        self._next_id = 0  # of the next row
        self._ticket = 0
        self._pending: dict[int, tuple[_Batch, int]] = {}  # under way: by ticket, with the branch
        # Rows answered last, until they are taken or, with one forward at a time, the next answer: they are large.
        self._dists: dict[PrefixNode, tuple[Dist, ...]] = {}  # each branch's row after a node
        self._sampled_rows: dict[PrefixNode, SampledRow] = {}
        self._prompt_rows: tuple[Dist, ...] = ()
        self._prompt_of: int | None = None  # branch whose first answer begins with rows of its prompt's end

    @property
    def idle(self) -> bool:
        """No forward is under way, not even one that a prune has dropped, and there is something to continue."""
        return self.started and not self._pending

    @property
    def under_way(self) -> int:
        """Forwards of which something is still wanted, of all branches together."""
        return len({id(batch) for batch, _ in self._pending.values() if any(node.alive for node in batch.nodes)})

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
        self._samples = self._samples and not (self._several and len(branches) > 1)
        self.log_evidence = log_h_of(branches)
        self._committed = list(prefix)
        head.cached = True
        self.mixer.start(self._branches, tuple(prefix), head)
        more = 0 if prefix or not branches else min(num_prompt_dists, len(branches[-1].prompt) - 1)
        self._prompt_of = len(branches) - 1 if more else None
        segments, sampled = self._prompts(tuple(prefix), more), self._samples and not prefix
        return self._forwards(segments, _Batch((head,), None), more, sampled=sampled)

    def commit_to(self, head: PrefixNode) -> list[Effect]:
        """Commit the rows on the path to `head`, keep those below it open, and drop the others.

        Only when idle, or where several are under way: then the tree's head itself stays open, whose row may be so.
        """
        if not self._open:
            return []
        if self._several and head.parent is not None:
            head = head.parent
        keep = list(takewhile(lambda node: node.row is not None, self.missing_rows(head)))
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
        return head.path_below(len(self._committed))

    def admitted(self, head: PrefixNode, drafts: Sequence[PrefixNode]) -> list[PrefixNode]:
        """Those of the drafts below `head`, parents first, that the constraint allows, in their order."""
        return self.mixer.admitted(head, drafts, self._path, leaves=self._samples)

    def append_rows(self, nodes: Sequence[PrefixNode], head: PrefixNode, now: float) -> list[Effect]:
        """Append rows, parents first. An open tree must have been committed with `commit_to`.

        Rows of decided nodes alone are a chain; without rescoring only its last row is scored.
        """
        start = len(self._committed) + len(self._open)
        tokens = tuple(node.token for node in nodes)
        parents: tuple[int, ...] | None = None
        ids: tuple[int, ...] | None = None
        wanted = tuple(nodes)
        if nodes[-1].position <= head.position and not self._open and not self._several:
            self._committed += tokens
            wanted = wanted if self.mixer.rescoring else wanted[-1:]
        else:
            ids = tuple(range(self._next_id, self._next_id + len(nodes)))
            self._next_id += len(nodes)
            for node, name in zip(nodes, ids, strict=True):
                node.row = name
            above = [None if node.parent is None else node.parent.row for node in nodes]
            parents = tuple(ROOT if row is None else row for row in above)  # ROOT: the parent is decided
            self._open += nodes
        for node in nodes:
            node.cached = True
        scored: LogitsMode = "last" if len(wanted) == 1 and parents is None else "all"
        segments = [
            Segment(SeqId(i), len(branch.prompt) + start, tokens, parents, scored, ids)
            for i, branch in enumerate(self._branches)
        ]
        return self._forwards(segments, _Batch(wanted, now), sampled=self._samples)

    def take(self, answer: Scored | Sampled) -> Sequence[PrefixNode]:
        """Take the answer to a forward. Once all branches have answered: its nodes, of which those that no prune has
        dropped are scored, or have a token, by now."""
        if answer.ticket not in self._pending:
            return ()
        batch, branch = self._pending.pop(answer.ticket)
        nodes = batch.nodes if answer.scored is None else tuple(batch.nodes[row] for row in answer.scored)
        batch.missing -= 1
        if isinstance(answer, Sampled):
            self._take_tokens(nodes, answer.rows)
        else:
            rows = self.mixer.take_prefix_rows(branch, answer.dists)
            if branch == self._prompt_of:
                self._prompt_rows, rows, self._prompt_of = tuple(rows[:-1]), rows[-1:], None
            if rows:  # else all are dropped, or of the prefix, and the node's comes in a segment of its own
                batch.parts[branch] = dict(zip(nodes, rows, strict=True))
            if batch.missing:
                return ()
            nodes = self._take_dists(batch)
        self.forwards += 1
        self.rows += len(batch.nodes)
        self.dropped += len(batch.nodes) - len(nodes)
        self.timed = None if batch.asked_at is None else (len(batch.nodes), answer.now - batch.asked_at)
        return batch.nodes

    def _take_tokens(self, nodes: tuple[PrefixNode, ...], rows: Sequence[SampledRow]) -> None:
        if self._prompt_of is not None:
            self._prompt_rows = tuple(row.top for row in rows[:-1] if row.top is not None)
            rows, self._prompt_of = rows[-1:], None
        answered = zip(nodes, rows, strict=True)
        if self._heads:
            for node, row in answered:
                if not node.dead:
                    self.mixer.take(node, row, partial(self._path_for_mixing, node))
            return
        found = {node: row for node, row in answered if row is not NOT_SAMPLED and not node.dead}
        self._sampled_rows = self._sampled_rows | found if self._several else found

    def _take_dists(self, batch: _Batch) -> tuple[PrefixNode, ...]:
        """Keep or mix every branch's rows; the nodes that have them all."""
        parts = [batch.parts.get(branch, {}) for branch in range(len(self._branches))]
        nodes = tuple(node for node in batch.nodes if all(node in part for part in parts))
        found = {node: tuple(part[node] for part in parts) for node in nodes if not node.dead}
        self._dists = self._dists | found if self._several else found
        if not self._lazy:
            for node in found:
                self._score(node)
            self.pop_branch_dists()
        return nodes

    def sample(self, node: PrefixNode) -> int | None:
        """The token after a node's prefix; None where the row has not been computed. Called once for each token, in
        order."""
        if self._samples:
            row = self._sampled_rows.get(node)
            if row is None:
                return None
            self.mixer.decide(row)
            node.plain = row.top
            return row.token
        dist = self.dist(node)
        return None if dist is None else sample(filter_top(dist, self._sampling), self._sampling, node.position)

    def dist(self, node: PrefixNode) -> Dist | None:
        """This side's distribution after a node's prefix; None where its row has not been computed."""
        if node.own_dist is None and node.alive and node in self._dists:
            self._score(node)
        return None if node.own_dist is None else node.own_dist.whole

    def pop_branch_dists(self) -> dict[PrefixNode, tuple[Dist, ...]]:
        """Each branch's row after each node answered last, or its head where the engine samples. Forgotten here."""
        dists, self._dists = self._dists, {}
        sampled, self._sampled_rows = self._sampled_rows, {}
        return dists | {node: (row.top,) for node, row in sampled.items() if row.top is not None}

    def prompt_dists(self) -> tuple[Sequence[int], Sequence[Dist]]:
        """Tokens of the last prompt's end, all but its very last, and the distributions after them. Forgotten here."""
        rows, self._prompt_rows = self._prompt_rows, ()
        tokens = self._branches[-1].prompt[-1 - len(rows) : -1] if rows else ()
        return tokens, [row.within(self._vocab_size) for row in rows]

    def _score(self, node: PrefixNode) -> None:
        """Set the distribution of a node that was answered last."""
        if node.alive or (self.mixer.rescoring and not node.dead):
            self.mixer.score(node, self._dists[node], self._path_for_mixing(node))

    def _path_for_mixing(self, node: PrefixNode) -> Sequence[int]:
        return self._path(node) if self.mixer.needs_path else ()

    def _path(self, node: PrefixNode) -> list[int]:
        """The output tokens from the answer's beginning to this node."""
        below = node.path_below(len(self._committed))
        return [*self._committed[: node.position], *(each.token for each in below)]

    def _forwards(
        self, segments: Sequence[Segment], batch: _Batch, num_prompt_rows: int = 0, *, sampled: bool
    ) -> list[Effect]:
        """num_prompt_rows: wanted rows of the last prompt's end, before the node's. sampled: by the engine."""
        if sampled:
            nodes, batch.missing = batch.nodes, 1
            self._ticket += 1
            self._pending[self._ticket] = batch, 0
            paths = list(map(self._path, nodes)) if self.mixer.needs_path else [()] * len(nodes)
            sampling, mixture = self.mixer.sampling(nodes, paths, self.num_top, heads=self._heads)
            heads = [RowSampling(_GREEDY, 0, self._vocab_size, num_top=self.num_top)] * num_prompt_rows
            in_order = self._lazy and not self._several and nodes[0].alive  # a walk begins at the first row
            path_only = in_order and segments[0].parents is not None and not self.num_top
            others, rows = tuple(segments[1:]), (*heads, *sampling)
            return [Forward(self._ticket, segments[0], rows, others, mixture, path_only, self.goes_on)]
        effects: list[Effect] = []
        batch.missing = len(segments)
        for segment in segments:
            self._ticket += 1
            self._pending[self._ticket] = batch, segment.seq
            effects.append(Forward(self._ticket, segment))
        return effects

    def _prompts(self, prefix: tuple[int, ...], num_prompt_rows: int) -> list[Segment]:
        """Every prompt with the prefix behind it, whose end is in a segment of its own where its rows are wanted.
        num_prompt_rows: wanted of the last prompt's end, besides its very last."""
        seam = len(prefix) - self.mixer.num_prefix_rows
        segments: list[Segment] = []
        for index, branch in enumerate(self._branches):
            prompt = (*branch.prompt, *prefix[:seam])
            more = num_prompt_rows if index == len(self._branches) - 1 else 0
            segments.append(Segment(SeqId(index), 0, prompt, None, 1 + more if more else "last"))
            if prefix[seam:]:
                segments.append(Segment(SeqId(index), len(prompt), prefix[seam:], None, "all"))
        return segments
