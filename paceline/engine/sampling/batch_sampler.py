"""Tokens of many rows in one pass, where the logits are: torch's twin of `core.sampling.sampler.sample_row`.

A pass narrows, and decides only what is certain. The maxima of groups of 64 ids are one sweep over a row; with the
noise's bound for each group (`core.sampling.dist`) they leave a few groups that can hold the token, so that neither
noise nor exponentials of a whole vocabulary are made. Only top-p needs a sum over the vocabulary, and only where the
best candidate is not among the most probable ids.

Candidates nearer than `margins`, ids at the edge of top-k, top-p or min-p, and everything else that rounding could
decide, are left to the reference on the host, which sees the row as `tensors.dists` gives it. So the token is the
reference's on every row and device; equal logits go to the lowest id everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling import dist as core_noise
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow, sample_row
from paceline.engine.sampling.open_sampler import open_tokens
from paceline.engine.sampling.row_kernel import MARGIN, falling_head, is_plain, margins, sample_rows
from paceline.engine.sampling.workspace import (
    DISTINCT,
    Array,
    Pending,
    Workspace,
    answers_of,
    gathered,
    group_maxima,
    host_rows,
    ids_of,
    is_remote,
    largest,
    may_revive,
    moved_ids,
    process,
    settled,
    some_rows,
    to_device,
)
from paceline.engine.tensors import dists

_CHUNK = 32  # rows at a time: bounds the workspace, 20 MB a buffer with 152,000 ids
_LONG_CHUNK = 128  # the same where each chunk is a wait, and for rows on the CPU that are sampled where they lie
_EDGE = 16  # ids beyond top-k that are read too, so that equal logits at its edge are all seen


class BatchSampler:
    """Keeps its workspace between calls. For one thread."""

    def __init__(self) -> None:
        self._workspace = Workspace()
        self.referred = 0  # rows left to the reference

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], places: Sequence[int] | None = None
    ) -> list[SampledRow]:
        """logits: (n, vocab), of any float type, on any device. One `vocab_size` for all rows. places: of the rows in
        `logits`; None: all of them, in order."""
        if places is None:
            places = range(len(rows))
        host = host_rows(logits)
        by_kernel = [host is not None and is_plain(row) for row in rows]
        found: dict[int, SampledRow] = {}
        with torch.inference_mode():
            for sample, kind in ((self._by_kernel, True), (self._chunks, False)):
                which = [at for at, is_by_kernel in enumerate(by_kernel) if is_by_kernel is kind]
                if which:
                    some = sample(logits, [rows[at] for at in which], [places[at] for at in which])
                    found.update(zip(which, some, strict=True))
        return [found[at] for at in range(len(rows))]

    def _by_kernel(self, logits: Tensor, rows: Sequence[RowSampling], places: Sequence[int]) -> list[SampledRow]:
        host = host_rows(logits[:, : rows[0].vocab_size])
        assert host is not None
        tokens, tops = sample_rows(host, rows, places, threads=torch.get_num_threads())
        return [
            self._referred(logits[place], row, top) if token is None else SampledRow(token, top)
            for place, row, token, top in zip(places, rows, tokens, tops, strict=True)
        ]

    def _chunks(self, logits: Tensor, rows: Sequence[RowSampling], places: Sequence[int]) -> list[SampledRow]:
        if list(places) != list(range(len(logits))):
            logits = logits[to_device(places, logits.device)]
        found: list[SampledRow] = []
        size = _LONG_CHUNK if is_remote(logits.device) or _are_read_in_place(logits, rows) else _CHUNK
        for first in range(0, len(rows), size):
            found += self._chunk(logits[first : first + size], rows[first : first + size])
        return found

    def _chunk(self, logits: Tensor, rows: Sequence[RowSampling]) -> list[SampledRow]:
        plain = logits[:, : rows[0].vocab_size]
        changed = [at for at, row in enumerate(rows) if row.changes_logits]
        if plain.dtype != torch.float32 and not _are_read_in_place(logits, rows):
            plain = self._workspace.buffer("plain", plain).copy_(plain)
        probs = None
        if any(row.num_top for row in rows):
            probs = torch.softmax(plain, -1, out=self._workspace.buffer("probs", plain))
        scores = plain
        low: Tensor | None = None
        if changed:
            scores = self._workspace.buffer("changed", plain).copy_(plain)
            for row in changed:
                process(scores[row], rows[row])
            low = torch.zeros(len(rows), dtype=torch.bool, device=plain.device)
            which = to_device(changed, plain.device)
            before = some_rows(plain, changed)
            low[which] = may_revive(before, some_rows(scores, changed), before.amax(1, keepdim=True))
        are_changed = [row.changes_logits for row in rows]
        tokens, tops = self.decided(scores, rows, are_changed, probs, low)
        return [
            self._referred(logits[row], rows[row], top) if token is None else SampledRow(token, top)
            for row, (token, top) in enumerate(zip(tokens, tops, strict=True))
        ]

    def _referred(self, logits: Tensor, row: RowSampling, top: Dist | None) -> SampledRow:
        self.referred += 1
        (dist,) = dists(logits[None])
        return SampledRow(sample_row(dist, row).token, top)

    def decided(
        self,
        scores: Tensor,
        rows: Sequence[RowSampling],
        changed: Sequence[bool],
        probs: Tensor | None,
        low: Tensor | None,
    ) -> tuple[list[int | None], list[Dist | None]]:
        """The token of each row, None where it is not certain, and its head. scores: processed. changed: rows whose
        scores are not the model's own, so that equal ones may differ in the reference. probs: (rows, vocab), for
        heads. low: (rows,) rows that are not certain."""
        kinds: dict[str, list[int]] = {}
        for row, wanted in enumerate(rows):
            cut = 0 < wanted.params.top_k < wanted.vocab_size
            kind = "greedy" if wanted.params.temperature == 0.0 else "top_k" if cut else "open"
            kinds.setdefault(kind, []).append(row)
        # Heads first: tokens may need the buffer of the probabilities.
        waiting: list[Pending[Any]] = [Pending([] if low is None else [low], list)]
        waiting.append(settled([None] * len(rows)) if probs is None else _heads(probs, rows))
        margin = margins(rows)
        # The kernel makes its own.
        by_kernel = host_rows(scores) is not None and kinds.keys() == {"open"}
        maxima = scores[:, :0] if by_kernel else group_maxima(scores)
        for kind, which in kinds.items():
            some, their_maxima = some_rows(scores, which), some_rows(maxima, which)
            chosen, are_changed = [rows[row] for row in which], np.array([changed[row] for row in which])
            if kind == "greedy":
                waiting.append(_greedy(some, their_maxima, are_changed))
            elif kind == "top_k":
                waiting.append(_top_k(some, their_maxima, chosen, are_changed, margin[which]))
            elif (host := host_rows(some)) is not None:
                certain, _ = sample_rows(host, chosen, heads=False, threads=torch.get_num_threads())
                waiting.append(settled(certain))
            else:
                waiting.append(open_tokens(self._workspace, some, their_maxima, chosen, margin[which]))
        seen, tops, *found = answers_of(waiting)
        tokens: list[int | None] = [None] * len(rows)
        for which, some_tokens in zip(kinds.values(), found, strict=True):
            for row, token in zip(which, some_tokens, strict=True):
                tokens[row] = None if seen and seen[0][row] else token
        return tokens, tops


def _are_read_in_place(logits: Tensor, rows: Sequence[RowSampling]) -> bool:
    """True for logits of which no copy is made: the kernel reads them, and they are wanted as they are."""
    return host_rows(logits) is not None and not any(row.changes_logits or row.num_top for row in rows)


def _heads(probs: Tensor, rows: Sequence[RowSampling]) -> Pending[list[Dist | None]]:
    """Heads of the rows that want one. probs: (rows, vocab)"""

    def finish(found: Sequence[Array]) -> list[Dist | None]:
        return [
            falling_head(their_ids[: row.num_top], their_probs[: row.num_top]) if row.num_top else None
            for row, their_ids, their_probs in zip(rows, *found, strict=True)
        ]

    ids, values = largest(probs, group_maxima(probs), min(max(row.num_top for row in rows), probs.shape[1]))
    return Pending([ids, values.double()], finish)


def _greedy(scores: Tensor, maxima: Tensor, are_changed: NDArray[np.bool_]) -> Pending[list[int | None]]:
    """The lowest id of the largest logit."""
    _, best = largest(scores, maxima, min(2, scores.shape[1]))
    certain = torch.isfinite(best[:, 0])  # else the reference says what is wrong
    if best.shape[1] > 1:
        certain &= ~torch.where(to_device(are_changed, scores.device), *_closeness(best[:, 0] - best[:, -1]))
    ids = ids_of(maxima.argmax(1, keepdim=True))  # of equals the first
    at = ids.gather(1, gathered(scores, ids).argmax(1, keepdim=True))
    return Pending([at[:, 0], certain], _certain_tokens)


def _certain_tokens(found: Sequence[Array]) -> list[int | None]:
    return [token if is_certain else None for token, is_certain in zip(*(each.tolist() for each in found), strict=True)]


def _closeness(gap: Tensor) -> tuple[Tensor, Tensor]:
    """True where the reference may order two logits otherwise, by this much above each other: it compares
    probabilities. First for changed ones, then for the model's own, of which equal ones are equal there too."""
    return gap <= MARGIN, (gap > 0.0) & (gap <= DISTINCT)


def _is_close(gap: Array, changed: NDArray[np.bool_], margin: NDArray[np.float64]) -> NDArray[np.bool_]:
    """The same on the host. margin: of changed ones."""
    return np.asarray(np.where(changed, gap <= margin, (gap > 0.0) & (gap <= DISTINCT)))


def _has_moved(row: RowSampling, ids: NDArray[np.int64]) -> bool:
    return not moved_ids(row).isdisjoint(ids.tolist())


def _top_k(
    scores: Tensor,
    maxima: Tensor,
    rows: Sequence[RowSampling],
    are_changed: NDArray[np.bool_],
    margin: NDArray[np.float64],
) -> Pending[list[int | None]]:
    """Top-k on the device; the rest among the few that remain, on the host."""
    most = max(row.params.top_k for row in rows)
    at, values = largest(scores, maxima, min(most + _EDGE, scores.shape[1]))
    return Pending([at, values.double()], partial(_top_k_tokens, scores.shape[1], rows, are_changed, margin))


def _top_k_tokens(
    vocab_size: int,
    rows: Sequence[RowSampling],
    are_changed: NDArray[np.bool_],
    margin: NDArray[np.float64],
    found: Sequence[Array],
) -> list[int | None]:
    ids, logits = found
    keys = core_noise.row_keys([row.params.seed for row in rows], [row.position for row in rows])
    temperatures = np.array([row.params.temperature for row in rows])[:, None]
    limits = np.array([row.params.top_k for row in rows])
    kept = np.arange(ids.shape[1]) < limits[:, None]
    kept &= logits > -np.inf
    every = np.arange(len(rows))
    edge, beyond = (logits[every, np.minimum(limits + more, ids.shape[1]) - 1] for more in (0, 1))
    # Equal logits of the model's own are equal in the reference too, in whatever rows; in bfloat16 they are frequent.
    moved = [
        is_changed and (edge[row] != beyond[row] or _has_moved(rows[row], ids[row][logits[row] == edge[row]]))
        for row, is_changed in enumerate(are_changed)
    ]
    with np.errstate(invalid="ignore"):  # -inf - -inf: of a row where the reference says what is wrong
        certain = ~_is_close(edge - beyond, np.array(moved), margin)
        below = (logits - logits[:, :1]) / temperatures
        close = _is_close(logits[:, :-1] - logits[:, 1:], are_changed[:, None], margin[:, None])
    if ids.shape[1] < vocab_size:
        certain &= (edge > logits[:, -1]) | (edge == -np.inf)  # else equals of the edge may be missing
    probs = np.where(kept, np.exp(below), 0.0)
    probs /= np.maximum(probs.sum(1, keepdims=True), np.finfo(np.float64).tiny)
    before = np.cumsum(probs, axis=1) - probs
    top_p = np.array([row.params.top_p for row in rows])[:, None]
    min_p = np.array([row.params.min_p for row in rows])[:, None]
    cut = kept & (top_p < 1.0) & (before > 0.0)
    certain &= ~(cut & (np.abs(before - top_p) < margin[:, None])).any(1)
    dropped = cut & (before >= top_p)
    certain &= ~(close & dropped[:, 1:] & ~dropped[:, :-1]).any(1)  # which of two is first, so that it is kept?
    kept &= ~dropped
    distance = below - np.log(np.maximum(min_p, np.finfo(np.float64).tiny))
    cut = kept & (min_p > 0.0) & ((below < 0.0) | are_changed[:, None]) & (np.arange(ids.shape[1]) > 0)
    certain &= ~(cut & (np.abs(distance) < margin[:, None])).any(1)
    kept &= ~(cut & (distance < 0.0))
    drawn = np.where(kept, below + core_noise.gumbel_rows(keys, ids), -np.inf)
    best = drawn.argmax(1)
    score = drawn[every, best]
    drawn[every, best] = -np.inf
    with np.errstate(invalid="ignore"):
        certain &= (score - drawn.max(1) > margin) & np.isfinite(score)
    return _certain_tokens((ids[every, best], certain))
