"""From the rows of all branches to one distribution: constraint, document scores, penalties, mixture.

Branches are mixed with weights exp(R) (DRAGON eq. 2). With rescoring, R follows the text: what each branch predicted of
the tokens so far is evidence for or against its document (`core.aggregation.weights.decayed_evidence`), kept per node,
so that nothing is rolled back. Knows nothing of sequences, tickets or the order of forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.core.aggregation.aggregators import OwnDist
from paceline.core.aggregation.weights import (
    BranchMixture,
    Evidence,
    deciders,
    dequantize_score,
    evidence_after,
    evidence_head,
    log_weight,
    mix,
    mix_heads,
    mix_processed,
    quantize_score,
    row_log_weights,
)
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.row import RowSampling, SampledRow, set_ranking
from paceline.core.sampling.sampler import apply_mask
from paceline.strategies.base import Branch, OutputRules
from paceline.strategies.decoding.prefix_tree import PrefixNode

AllowedIds = NDArray[np.bool_] | None  # a mask; None: all ids
NO_COUNTS: Mapping[int, int] = {}
RESCORED_TOKENS = 48  # of a prefix, at its end: what lies further back adds less than the quantization of a score


class BranchMixer:
    """Mixes the branches of one answer. A node is scored after its parent."""

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
            (dist,) = _masked((row.within(self._vocab_size),), mask)
            probs.append(dist.prob(self._prefix[position]))
        return dists[len(rows) :]

    def score(self, node: PrefixNode, rows: Sequence[Dist], path: Sequence[int]) -> None:
        """Set a node's distribution from each branch's row. path: its output tokens; empty unless `needs_path`."""
        rows = [row.within(self._vocab_size) for row in rows]
        dists = _masked(rows, self._allowed_after(node, path))
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
        masks: Sequence[AllowedIds] = (None,) * len(nodes)
        if self._mask is not None:
            wanted = [partial(self._allowed_after, node, path) for node, path in zip(nodes, paths, strict=True)]
            masks = self._masks(wanted)
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
            rows = [dist.within(self._vocab_size) for dist in dists()]
            known = path()
            return self._mixed(node, _masked(rows, self._allowed(known)), known)

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
        if len(rows) == 1:
            return rows[0].within(self._vocab_size)
        return mix(rows, self._weights).within(self._vocab_size)

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
        scores = [
            branch.score + added
            for branch, added in zip(self._branches, node.evidence, strict=True)
            if branch.score is not None
        ]
        node.log_evidence = dequantize_score(quantize_score(log_weight(scores))) if scores else None

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


def _masked(dists: Sequence[Dist], allowed: AllowedIds) -> Sequence[Dist]:
    return dists if allowed is None else [apply_mask(dist, allowed) for dist in dists]
