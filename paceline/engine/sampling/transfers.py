"""Numbers between the host and the device of the logits: what a step needs to see comes in one copy, with one wait.

Each way to sample is a generator: it queues its work on the device, yields the tensors that it must see, and continues
with them as arrays. `together` lets all of them go as far as they can, then fetches what they wait for at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 8  # bytes

Array = NDArray[Any]  # of the dtype of the tensor that was yielded
Answer = TypeVar("Answer")
Other = TypeVar("Other")
Rounds = Generator[Sequence[Tensor], Sequence[Array], Answer]


def is_remote(device: torch.device) -> bool:
    """True if to look at a tensor is to wait for all work that is queued."""
    return device.type != "cpu"


def to_device(values: NDArray[np.generic] | Sequence[int | float | bool], device: torch.device) -> Tensor:
    """Without waiting: CUDA has read memory that is not pinned when the call returns. A CPU uses the same memory."""
    array = values if isinstance(values, np.ndarray) else np.array(values)
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


def run(rounds: Rounds[Answer]) -> Answer:
    """The answer: one copy for each round."""
    try:
        wanted = next(rounds)
        while True:
            wanted = rounds.send(to_host(wanted))
    except StopIteration as done:
        answer: Answer = done.value
        return answer


def settled(answer: Answer) -> Rounds[Answer]:
    """An answer that waits for nothing."""
    yield from ()
    return answer


def together(waiting: Sequence[Rounds[Answer]]) -> Rounds[list[Answer]]:
    """The answers of all, whose rounds coincide."""
    if len(waiting) == 1:
        return [(yield from waiting[0])]
    answers: dict[int, Answer] = {}
    seen: dict[int, Sequence[Array]] = {}
    while len(answers) < len(waiting):
        wanted: dict[int, Sequence[Tensor]] = {}
        for at, each in enumerate(waiting):
            if at not in answers:
                try:
                    wanted[at] = each.send(seen[at]) if seen else next(each)
                except StopIteration as done:
                    answers[at] = done.value
        if wanted:
            found = iter((yield [tensor for tensors in wanted.values() for tensor in tensors]))
            seen = {at: [next(found) for _ in tensors] for at, tensors in wanted.items()}
    return [answers[at] for at in range(len(waiting))]


def beside(first: Rounds[Answer], second: Rounds[Other]) -> Rounds[tuple[Answer, Other]]:
    """Both answers, whose rounds coincide."""
    waiting = cast("list[Rounds[Answer | Other]]", [first, second])
    one, other = yield from together(waiting)
    return cast("Answer", one), cast("Other", other)
