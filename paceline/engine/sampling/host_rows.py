"""Answers to `Engine.sample` from logits in arrays of numpy, for engines that compute on the host without torch.

What the kernel in C can decide, it decides; all else is the reference's, whose row of 152,000 ids takes 2 ms, a mixture
of three 8 ms: less than such an engine's forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowSampling, SampledRow, sample_row
from paceline.engine.base import SampleRequest
from paceline.engine.sampling import row_kernel


class HostLogits(msgspec.Struct, frozen=True, eq=False):
    """`Logits` as arrays, which must not change as long as this object lives."""

    rows: NDArray[np.float32] | tuple[NDArray[np.float32], ...]  # (rows, vocab)

    def __len__(self) -> int:
        return len(self.rows)

    def dists(self) -> tuple[Dist, ...]:
        return tuple(map(_dist, self.rows))


def _dist(scores: NDArray[np.float32]) -> Dist:
    """By a softmax in float64: logits that differ have probabilities that differ, and equal ones equal ones."""
    with np.errstate(invalid="ignore"):  # of a row without numbers, which the sampler refuses
        best = scores.max()
        probs = np.subtract(scores, best, dtype=np.float64)
        np.exp(probs, out=probs)
        total = probs.sum()
        probs /= total
        return Dist.dense(probs, float(best + np.log(total)))


def sample_host_rows(requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
    """`Engine.sample` for engines whose forwards return `HostLogits`."""
    return [_sampled(request) for request in requests]


def _sampled(request: SampleRequest) -> tuple[SampledRow, ...]:
    parts = [part.rows for part in request.branches[0] if isinstance(part, HostLogits)]
    if request.mixture is not None or len(parts) < len(request.branches[0]):
        return request.by_reference()  # also where a wrapped engine has replaced the distributions
    scores = [row for part in parts for row in part]
    return request.row_by_row(lambda row: _sampled_row(scores[row], request.rows[row]))


def _sampled_row(scores: NDArray[np.float32], row: RowSampling) -> SampledRow:
    if row_kernel.is_plain(row) and row_kernel.kernel() is not None:
        (token,), (top,) = row_kernel.sample_rows(scores[None, : row.vocab_size], [row])
        if token is not None:
            return SampledRow(token, top)
    return sample_row(_dist(scores), row)
