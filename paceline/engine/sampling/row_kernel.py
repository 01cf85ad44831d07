"""Tokens and heads of rows on a CPU by the kernel in C, where the installation has built it: rows over torch's threads.

What samples without it: `open_sampler`, whose search this is. It takes a fraction of that one's time because a row is
read once, not once for each operation. Top-k is not handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.dist import GROUP, Dist, row_keys
from paceline.core.sampling.sampler import RowSampling
from paceline.engine.sampling.noise import margins
from paceline.engine.sampling.workspace import is_remote

if TYPE_CHECKING:
    from types import ModuleType

MAX_HEAD: Final = GROUP  # ids
_ROWS_A_THREAD: Final = 4  # fewer are not worth another thread


@cache
def kernel() -> ModuleType | None:
    """The module in C, or None where it was not built."""
    try:
        return import_module("paceline.engine.sampling._row_kernel")
    except ModuleNotFoundError:
        return None


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="sampling")


def fits(logits: Tensor) -> bool:
    """True for logits that the kernel can read where they are."""
    return (
        not is_remote(logits.device)
        and logits.dtype in (torch.float32, torch.bfloat16)
        and (logits.shape[1] == 1 or logits.stride(1) == 1)
        and kernel() is not None
    )


def sample_rows(
    logits: Tensor, rows: Sequence[RowSampling], places: Sequence[int] | None = None, *, heads: bool = True
) -> tuple[list[int | None], list[Dist | None]]:
    """The token of each row, None where it is not certain, and its head. logits: (n, vocab) that fit, at temperature 0
    the model's own. places: of the rows in `logits`; None: all of them, in order. heads: those that rows want, of at
    most `MAX_HEAD` ids."""
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
        logits.stride(0) * logits.element_size(),
        int(logits.dtype == torch.bfloat16),
        logits.data_ptr(),
        *(array.ctypes.data for array in arrays),
    )
    _run(arguments, min(torch.get_num_threads(), count // _ROWS_A_THREAD))
    found = [token if token >= 0 else None for token in tokens.tolist()]
    if not width:
        return found, [None] * count
    return found, [
        _head(ids[row, :size], probs[row, :size]) if num_top else None
        for row, (size, num_top) in enumerate(zip(head_sizes.tolist(), num_tops.tolist(), strict=True))
    ]


def _run(arguments: tuple[int, ...], num_threads: int) -> None:
    """All rows: every thread takes the next one until none is left."""
    module = kernel()
    assert module is not None, "`fits` says so"
    others = [_helpers().submit(module.work_on_rows, *arguments) for _ in range(num_threads - 1)]
    try:
        module.work_on_rows(*arguments)
    finally:
        for other in others:
            if not other.cancel():  # it has begun: the arrays must outlive it
                other.result()


def _head(ids: NDArray[np.int32], probs: NDArray[np.float64]) -> Dist:
    """ids, probs: falling. Those of probability 0 are left out."""
    count = int(np.count_nonzero(probs))
    order = np.argsort(ids[:count])
    kept = probs[order]
    return Dist(ids[order], kept, max(1.0 - float(kept.sum()), 0.0))
