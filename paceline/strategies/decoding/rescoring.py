"""From the rows of all branches to one distribution: constraint, document scores, penalties, mixture.

Branches are mixed with weights exp(R) (DRAGON eq. 2). With rescoring, R follows the text: what each branch predicted of
the tokens so far is evidence for or against its document (`core.aggregation.weights.decayed_evidence`), kept per node,
so that nothing is rolled back. Knows nothing of sequences, tickets or the order of forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.aggregation.branches import BranchMixture, Evidence, evidence_after
from paceline.core.aggregation.weights import (
    dequantize_score,
    evidence_head,
    log_weight,
    mix,
    mix_heads,
    quantize_score,
)
from paceline.core.drafting.lookup_table import NUM_SUCCESSORS
from paceline.core.sampling.constraint import Mask
from paceline.core.sampling.dist import Dist, IdArray
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.core.sampling.sampler import SamplingParams, apply_mask, process_logits
from paceline.strategies.base import Branch
from paceline.strategies.decoding.prefix_tree import PrefixNode

NO_COUNTS: Mapping[int, int] = {}
RESCORED_TOKENS = 48  # of a prefix, at its end: what lies further back adds less than the quantization of a score


class BranchMixer:
    """Mixes the branches of one answer. A node is scored after its parent."""

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        *,
        rescoring: bool,
        mask: Mask | None,
        eos_ids: frozenset[int],
        keep_heads: bool,
    ) -> None:
        self.num_prefix_rows = 0  # tokens at the prefix's end that are rescored; `take_prefix_rows` takes their rows
        self.needs_path = mask is not None or sampling.looks_back  # `score` needs the tokens before a row
        self.rescoring = rescoring
        self._sampling = sampling
        self._penalised = sampling.looks_back
        self._vocab_size = vocab_size
        self._mask = mask
        self._eos_ids = eos_ids
        self._keep_heads = keep_heads
        self._branches: tuple[Branch, ...] = ()
        self._weights: tuple[float, ...] = ()  # R of each branch, 0 without a document
        self._prompt_ids: tuple[IdArray | None, ...] = ()  # ids of each prompt, where a penalty needs them
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
        for position, row in enumerate(rows, len(self._prefix) - self.num_prefix_rows + len(probs)):
            (dist,) = self._masked(self._prefix[:position], (row.within(self._vocab_size),))
            probs.append(dist.prob(self._prefix[position]))
        return dists[len(rows) :]

    def score(self, node: PrefixNode, rows: Sequence[Dist], path: Sequence[int]) -> None:
        """Set a node's distribution from each branch's row. path: its output tokens; empty unless `needs_path`."""
        rows = [row.within(self._vocab_size) for row in rows]
        dists = self._masked(path, rows)
        if self.rescoring:
            self._rescore(node, dists)
        if node.alive:
            node.own_dist = self._mixed(node, dists, path)
            if self._keep_heads:
                node.raw_head = mix_heads(rows, self._weights, NUM_SUCCESSORS)

    def sampling(
        self, nodes: Sequence[PrefixNode], paths: Sequence[Sequence[int]], num_top: int
    ) -> tuple[list[RowSampling], BranchMixture | None]:
        """How the engine samples the rows of these nodes, parents first, of which the first continues what is decided.

        paths: as of `score`.
        """
        alone = len(self._branches) == 1
        rows = [
            RowSampling(
                self._sampling,
                node.position,
                self._vocab_size,
                Counter(path) if self._penalised else NO_COUNTS,
                self._prompt_ids[0] if alone else None,
                self._allowed(path),
                num_top,
            )
            for node, path in zip(nodes, paths, strict=True)
        ]
        if alone:
            return rows, None
        index = {node: row for row, node in enumerate(nodes)}
        parents = tuple(-1 if node.parent is None else index.get(node.parent, -1) for node in nodes)
        tokens = tuple(node.token for node in nodes)
        return rows, BranchMixture(
            self._weights, self._decided_evidence, self.rescoring, parents, tokens, self._prompt_ids
        )

    def decide(self, row: SampledRow) -> None:
        """The row's token was decided: what the engine samples next continues it."""
        if self.rescoring and row.branch_probs:
            self._decided_evidence = evidence_after(self._decided_evidence, row.branch_probs)

    def plain(self, rows: Sequence[Dist]) -> Dist:
        """The mixture of each branch's row, without any processing; a head that the engine has mixed as it is."""
        if len(rows) == 1:
            return rows[0].within(self._vocab_size)
        return mix(rows, self._weights).within(self._vocab_size)

    def _mixed(self, node: PrefixNode, dists: Sequence[Dist], path: Sequence[int]) -> Dist:
        counts = Counter(path) if self._penalised else NO_COUNTS
        evidence = node.evidence or (0.0,) * len(dists)
        weights = [weight + added for weight, added in zip(self._weights, evidence, strict=True)]
        prompts = zip(dists, self._prompt_ids, strict=True)
        return mix([process_logits(dist, self._sampling, counts, ids) for dist, ids in prompts], weights)

    def _masked(self, path: Sequence[int], dists: Sequence[Dist]) -> Sequence[Dist]:
        """Each branch's distribution after a path, under the constraint."""
        allowed = self._allowed(path)
        return dists if allowed is None else [apply_mask(dist, allowed) for dist in dists]

    def _allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """Tokens that the constraint allows after a path, at least one; None: all."""
        allowed = None if self._mask is None else self._mask.allowed(path)
        if allowed is None or allowed[: self._vocab_size].any():
            return allowed
        # No text goes through here: a draft that breaks the constraint, or one the mask could not follow.
        ends = np.zeros(self._vocab_size, dtype=np.bool_)
        ends[[token for token in self._eos_ids if token < self._vocab_size]] = True
        return ends if ends.any() else None

    def _rescore(self, node: PrefixNode, dists: Sequence[Dist]) -> None:
        """Set the evidence for each document from the text up to this node. dists: after it, before processing."""
        parent = node.parent
        if node.evidence is None:
            if node is self._root:  # there may be nodes above it: targets that came before the prompts
                evidence = (0.0,) * len(dists)
                for probs in zip(*self._prefix_probs, strict=True):
                    evidence = evidence_after(evidence, probs)
            else:
                assert parent is not None and parent.evidence is not None and parent.branch_dists, (
                    "scored after its parent"
                )
                evidence = evidence_after(parent.evidence, [dist.prob(node.token) for dist in parent.branch_dists])
            node.evidence = evidence
        node.branch_dists = tuple(map(evidence_head, dists))
        if parent is not None and not parent.alive:
            parent.branch_dists = ()
        scores = [
            branch.score + added
            for branch, added in zip(self._branches, node.evidence, strict=True)
            if branch.score is not None
        ]
        node.log_evidence = dequantize_score(quantize_score(log_weight(scores))) if scores else None
