"""Rows of logits in arrays of numpy, without torch: tokens and heads by the kernel in C, where the installation has
built it.

What samples without it: `open_sampler`, whose search this is, for rows of torch; the reference for those of numpy. It
takes a fraction of that one's time because a row is read once, not once for each operation. Top-k is not handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling.dist import GROUP, Dist, row_keys
from paceline.core.sampling.sampler import RowSampling, SampledRow, sample_row
from paceline.engine.base import SampleRequest
from paceline.system import Threads

if TYPE_CHECKING:
    from types import ModuleType

HostRows: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
"""(rows, vocab) logits, whose ids lie side by side; of bfloat16 the bits."""

MAX_HEAD: Final = GROUP  # ids
_ROWS_A_THREAD: Final = 4  # fewer are not worth another thread

# How near two scores must be for rounding to decide between them; such rows are left to the reference.

MARGIN: Final = 1e-4  # nats between scores: far more than float32's rounding of logits and softmax
ROUNDING: Final = 1e-6  # nats: that rounding itself, which a temperature below 1 magnifies
_FAR: Final = 600.0  # nats below the best score of all, where probabilities are 0 or nearly


def margins(rows: Sequence[RowSampling]) -> NDArray[np.float64]:
    """(rows,) `MARGIN` of scores and of a row's probability, and more of it at low temperatures."""
    temperatures = np.array([row.params.temperature or 1.0 for row in rows])
    return np.maximum(MARGIN, ROUNDING / temperatures)


def is_plain(row: RowSampling) -> bool:
    """True for rows that the kernel samples from the model's own logits."""
    return not row.changes_logits and not 0 < row.params.top_k < row.vocab_size and row.num_top <= MAX_HEAD


@cache
def kernel() -> ModuleType | None:
    """The module in C, or None where it was not built."""
    try:
        return import_module("paceline.engine.sampling._row_kernel")
    except ModuleNotFoundError:
        return None


@cache
def _helpers() -> Threads:
    return Threads(None, "sampling")


def sample_rows(
    logits: HostRows,
    rows: Sequence[RowSampling],
    places: Sequence[int] | None = None,
    *,
    heads: bool = True,
    threads: int = 1,
) -> tuple[list[int | None], list[Dist | None]]:
    """The token of each row, None where it is not certain, and its head. logits: at temperature 0 the model's own.
    places: of the rows in `logits`; None: all of them, in order. heads: those that rows want, of at most `MAX_HEAD`
    ids."""
    assert logits.shape[1] == 1 or logits.strides[1] == logits.itemsize, "the kernel reads ids side by side"
    count, vocab = len(rows), logits.shape[1]
    places = range(count) if places is None else places
    assert not count or 0 <= min(places) <= max(places) < len(logits), "the kernel reads where it is told"
    where = np.array(places, dtype=np.int64)
    num_tops = np.array([row.num_top if heads else 0 for row in rows], dtype=np.int32)
    width = min(int(num_tops.max(initial=0)), vocab)
    np.minimum(num_tops, width, out=num_tops)
    params = [row.params for row in rows]
    keys = row_keys([each.seed for each in params], [row.position for row in rows])
    options = np.array([(1.0 / (each.temperature or 1.0), each.top_p, each.min_p, 0.0) for each in params])
    options[:, 3] = margins(rows)
    are_greedy = np.array([each.temperature == 0.0 for each in params], dtype=np.uint8)
    counter = np.zeros(1, dtype=np.int64)
    tokens, head_sizes = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int32)
    ids, probs = np.empty((count, width), dtype=np.int32), np.empty((count, width))
    arrays = (where, are_greedy, keys, options, num_tops, tokens, ids, head_sizes, probs)
    arguments = (
        counter.ctypes.data,
        count,
        vocab,
        width,
        logits.strides[0],
        int(logits.dtype == np.uint16),
        logits.ctypes.data,
        *(array.ctypes.data for array in arrays),
    )
    _run(arguments, min(threads, count // _ROWS_A_THREAD))
    found = [token if token >= 0 else None for token in tokens.tolist()]
    if not width:
        return found, [None] * count
    return found, [
        falling_head(ids[row, :size], probs[row, :size]) if num_top else None
        for row, (size, num_top) in enumerate(zip(head_sizes.tolist(), num_tops.tolist(), strict=True))
    ]


def _run(arguments: tuple[int, ...], num_threads: int) -> None:
    """All rows: every thread takes the next one until none is left."""
    module = kernel()
    assert module is not None, "who calls has asked `kernel`"
    others: list[Future[None]] = []
    try:
        for _ in range(num_threads - 1):
            others.append(_helpers().submit(module.work_on_rows, *arguments))
        module.work_on_rows(*arguments)
    finally:
        for other in others:
            if not other.cancel():  # it has begun: the arrays must outlive it
                other.result()


def falling_head(ids: NDArray[np.integer[Any]], probs: NDArray[np.float64]) -> Dist:
    """ids, probs: falling. Those of probability 0 are left out."""
    count = int(np.count_nonzero(probs))
    return Dist.head(ids[:count], probs[:count])


# Answers to `Engine.sample` for engines that compute on the host. What the kernel cannot decide is the reference's,
# whose row of 152,000 ids takes 2 ms, a mixture of three 8 ms: less than such an engine's forward.


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
    own, plain = scores[: row.vocab_size], row
    if row.allowed is not None and not row.num_top:  # heads are of all ids
        allowed = np.where(row.allowed[: row.vocab_size], own, -np.inf)
        if allowed.max() >= own.max() - _FAR:  # else all of them may have probability 0 to the reference
            own, plain = allowed, msgspec.structs.replace(row, allowed=None)
    if is_plain(plain) and not (row.params.temperature or row.num_top):
        best = int(own.argmax())
        if np.isfinite(own[best]):
            return SampledRow(best)
    elif is_plain(plain) and kernel() is not None:
        (token,), (top,) = sample_rows(own[None], [plain])
        if token is not None:
            return SampledRow(token, top)
    return sample_row(_dist(scores), row)
