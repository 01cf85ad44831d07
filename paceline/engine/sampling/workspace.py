"""What samplers share: buffers kept between calls, transfers to a device, groups of rows, penalties and masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.sampling.dist import GROUP
from paceline.core.sampling.sampler import RowSampling, logit_shifts, repeated_ids
from paceline.engine.sampling import row_kernel

# Numbers between the host and the device of the logits: what a step needs to see comes in one copy, with one wait.
#
# Each way to sample queues its work on the device and says which tensors it must see. Few rows need a second look.


_ALIGNED = 8  # bytes

Array = NDArray[Any]  # of the dtype of the tensor that was yielded
Answer = TypeVar("Answer")


def is_remote(device: torch.device) -> bool:
    """True if to look at a tensor is to wait for all work that is queued."""
    return device.type != "cpu"


def host_rows(logits: Tensor) -> row_kernel.HostRows | None:
    """The logits as the kernel in C reads them, where they are; None for others, and without the kernel."""
    if is_remote(logits.device) or row_kernel.kernel() is None or (logits.shape[1] != 1 and logits.stride(1) != 1):
        return None
    if logits.dtype == torch.bfloat16:
        rows: row_kernel.HostRows = logits.view(torch.uint16).numpy()
        return rows
    return logits.numpy() if logits.dtype == torch.float32 else None


def to_device(values: NDArray[np.generic] | Sequence[int | float | bool], device: torch.device) -> Tensor:
    """Without waiting: CUDA has read memory that is not pinned when the call returns. A CPU uses the same memory, but
    what cannot be written, which torch warns of, is copied."""
    array = values if isinstance(values, np.ndarray) and values.flags.writeable else np.array(values)
    return torch.from_numpy(array).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Array]:
    """These tensors as arrays, all of them in one copy. On a CPU they share the tensors' memory."""
    if not tensors or not is_remote(tensors[0].device):
        return [tensor.numpy() for tensor in tensors]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    stops = list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    device = tensors[0].device
    packed = torch.empty(stops[-1], dtype=torch.uint8, device=device)
    pinned = torch.empty(stops[-1], dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    places = [slice(start, start + size) for start, size in zip([0, *stops], sizes, strict=False)]
    for place, tensor in zip(places, tensors, strict=True):
        packed[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    pinned.copy_(packed, non_blocking=True)
    if device.type == "cuda":
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        copied.record()
        copied.synchronize()
    return [
        pinned[place].view(tensor.dtype).view(tensor.shape).numpy()
        for place, tensor in zip(places, tensors, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Pending(Generic[Answer]):
    """An answer that waits for the numbers of tensors."""

    wanted: Sequence[Tensor]
    finish: Callable[[Sequence[Array]], Answer]


def settled(answer: Answer) -> Pending[Answer]:
    """One that waits for nothing."""
    return Pending([], lambda _: answer)


def answers_of(waiting: Sequence[Pending[Any]]) -> list[Any]:
    """What is wanted for all of them comes in one copy."""
    found = iter(to_host([tensor for each in waiting for tensor in each.wanted]))
    return [each.finish([next(found) for _ in each.wanted]) for each in waiting]


# Changes of logits before sampling: constraint, repetition penalty, bias, penalties and temperature.


def process(scores: Tensor, row: RowSampling) -> None:
    """Constraint, repetition penalty, bias and penalties, in place. scores: (vocab,)"""
    vocab, params = len(scores), row.params
    if row.allowed is not None:
        allowed = to_device(np.ascontiguousarray(row.allowed[:vocab]), scores.device)
        scores.masked_fill_(~allowed, -torch.inf)
    if params.repetition_penalty != 1.0:
        repeated = repeated_ids(row.counts, row.prompt)
        ids = to_device(repeated[repeated < vocab].astype(np.int64), scores.device)
        before = scores[ids]
        scores[ids] = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
    shifts = {token: shift for token, shift in logit_shifts(params, row.counts).items() if shift and token < vocab}
    if shifts:
        ids = to_device(list(shifts), scores.device)
        scores[ids] += to_device(list(shifts.values()), scores.device).to(scores.dtype)


def moved_ids(row: RowSampling) -> set[int]:
    """Ids whose logits `process` moves; those that it forbids are not among them."""
    moved = {token for token, shift in logit_shifts(row.params, row.counts).items() if shift}
    if row.params.repetition_penalty != 1.0:
        moved.update(repeated_ids(row.counts, row.prompt).tolist())
    return moved


def inverse_temperatures(rows: Sequence[RowSampling], device: torch.device) -> Tensor:
    """(rows, 1), 1 for greedy ones"""
    values = [1.0 / (row.params.temperature or 1.0) for row in rows]
    return to_device(np.array(values, dtype=np.float64), device)[:, None]


# How near two values must be for rounding to decide between them, beside `row_kernel.MARGIN`.


DISTINCT = 1e-5  # nats: logits that differ by more have different probabilities in float32
UNDERFLOW = 80.0  # nats below the best: probabilities in float32 may be 0 there


def may_revive(plain: Tensor, scores: Tensor, best: Tensor) -> Tensor:
    """(rows,) True where an id may be chosen to which the reference, by its model's own probability in float32, gives
    none. plain, scores: (rows, vocab) before and after changes. best: (rows, 1) the model's own largest logits."""
    floor = best - UNDERFLOW
    if not is_remote(plain.device) and bool((plain.amin(1, keepdim=True) >= floor).all()):
        return torch.zeros(len(plain), dtype=torch.bool, device=plain.device)
    lost = scores.masked_fill(plain >= floor, -torch.inf).amax(1)
    top = scores.amax(1)
    return (lost > top - UNDERFLOW) | (top == -torch.inf)


class Workspace:
    """Float32 buffers by name. A fresh one would cost more in page faults than what fills it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """The buffer of this name in this shape, on this device; its contents are those of the last use."""
        return self.rows(name, like.shape[0], like.shape[1], like.device)

    def rows(self, name: str, count: int, width: int, device: torch.device) -> Tensor:
        """`buffer` by its shape."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count * width or buffer.device != device:
            self._buffers[name] = buffer = torch.empty(count * width, device=device)
        return buffer[: count * width].view(count, width)

    def picked(self, scores: Tensor, which: Sequence[int]) -> Tensor:
        """Copies of some rows, valid until the next call; the tensor itself for all of them."""
        if len(which) == len(scores):
            return scores
        index = to_device(which, scores.device)
        return torch.index_select(scores, 0, index, out=self.buffer("picked", scores[: len(which)]))

    def softmax(self, scores: Tensor, rows: Sequence[RowSampling]) -> Tensor:
        """(rows, vocab), at the rows' temperatures; valid until the next call."""
        probs = self.buffer("probs", scores)
        if any(row.params.temperature != 1.0 for row in rows):
            torch.mul(scores, inverse_temperatures(rows, scores.device).float(), out=probs)
            scores = probs
        return torch.softmax(scores, -1, out=probs)


# Rows of logits by groups of ids: one sweep for the groups' maxima, then only the groups that matter.
#
# Groups are those of the common noise (`core.sampling.dist.GROUP`). Equal values go to the lowest id everywhere.


_LEAST_BITS = 0xFF80  # of minus infinity in bfloat16
MAX_BY_GROUPS = 130  # a larger k sorts the row


def group_maxima(scores: Tensor) -> Tensor:
    """(rows, groups) float32: the largest logit of each group of ids; the last group may be smaller."""
    if scores.dtype == torch.bfloat16 and scores.device.type == "cpu":
        return _half_maxima(scores)
    return _by_group(scores.float(), torch.amax)


def _by_group(scores: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    vocab = scores.shape[1]
    whole = vocab - vocab % GROUP
    found = reduce(torch.unflatten(scores[:, :whole], 1, (whole // GROUP, GROUP)), dim=2) if whole else scores[:, :0]
    return found if whole == vocab else torch.cat((found, reduce(scores[:, whole:], dim=1, keepdim=True)), 1)


def _half_maxima(scores: Tensor) -> Tensor:
    """Maxima of bfloat16 as of integers with the same bits, in an eighth of the time: those at least 0 have the order
    of their bits, those below the reverse. A row in which a number is not one has no other maxima."""
    bits = scores.view(torch.int16)
    best = _by_group(bits, torch.amax)
    if bool((best < 0).any()):
        best = torch.where(best < 0, _by_group(bits, torch.amin), best)
    found = best.view(torch.bfloat16).float()
    highest = scores.view(torch.int16).numpy().view(np.uint16).max(1)  # of all below 0, those that are no number
    found[torch.from_numpy(highest > _LEAST_BITS)] = torch.nan
    return found


def largest(values: Tensor, maxima: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the k largest of each row, falling, equals by rising id. Of equals at the edge any may be left
    out. maxima: (rows, groups) of the groups of ids."""
    if k <= MAX_BY_GROUPS and k < maxima.shape[1]:
        ids = ids_of(torch.topk(maxima, k).indices.sort(dim=1).values)
        candidates = gathered(values, ids)
        best = torch.topk(candidates, k)
        found, at = best.values, ids.gather(1, best.indices)
    else:
        best = torch.topk(values, k)
        found, at = best.values, best.indices
    at, order = at.sort(dim=1)
    found, by_value = found.gather(1, order).sort(dim=1, descending=True, stable=True)
    return at.gather(1, by_value), found


def ids_of(groups: Tensor) -> Tensor:
    """(rows, n) groups → (rows, n * GROUP) ids; the last group's may be beyond the vocabulary."""
    return (groups[:, :, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten(1)


def gathered(scores: Tensor, ids: Tensor, rows: Tensor | None = None) -> Tensor:
    """Logits of ids, -inf for those beyond the vocabulary. rows: (rows, 1) of `scores`;
    None: all, in order."""
    vocab = scores.shape[1]
    within = ids.clamp(max=vocab - 1)
    found = scores.gather(1, within) if rows is None else scores[rows, within]
    return found if vocab % GROUP == 0 else found.masked_fill_(ids >= vocab, -torch.inf)


def some_rows(tensor: Tensor, which: Sequence[int]) -> Tensor:
    """Some rows, ascending; the tensor itself for all of them."""
    return tensor if len(which) == len(tensor) else tensor[to_device(which, tensor.device)]
