"""Data-parallel training in several processes on one machine.

Processes of one thread each, synchronised twice a step, replace one process whose threads synchronise at every
operation: where other work takes a core away now and then, the latter is several times slower.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Protocol

import torch
from torch import Tensor, multiprocessing
from torch.multiprocessing.spawn import spawn

_TIMEOUT_S = 600.0


class _Barrier(Protocol):
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(slots=True)
class Group:
    """A process's rank among the others, and the shared memory through which they exchange vectors."""

    rank: int
    shared: Tensor  # (processes, length)
    barrier: _Barrier

    @property
    def size(self) -> int:
        return self.shared.shape[0]

    def total(self, vector: Tensor) -> Tensor:
        """All-reduce: the sum of all processes' vectors."""
        if self.size == 1:
            return vector
        length = vector.numel()
        self.shared[self.rank, :length] = vector
        self.barrier.wait(_TIMEOUT_S)
        result = self.shared[:, :length].sum(0)
        self.barrier.wait(_TIMEOUT_S)
        return result


def alone() -> Group:
    return Group(0, torch.empty(1, 0), threading.Barrier(1))


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {name: piece.view_as(tensor) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


def _enter(rank: int, work: object, shared: Tensor, barrier: Barrier, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    work(Group(rank, shared, barrier), *arguments)  # type: ignore[operator]


def gather(work: object, length: int, processes: int, *arguments: object) -> None:
    """Run `work(group, *arguments)` in `processes` processes at once; vectors have at most `length` numbers."""
    context = multiprocessing.get_context("spawn")
    shared = torch.zeros(processes, length).share_memory_()  # type: ignore[no-untyped-call]
    inputs = (work, shared, context.Barrier(processes), arguments)
    spawn(_enter, inputs, nprocs=processes)  # type: ignore[no-untyped-call]
