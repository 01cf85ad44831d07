"""Processing units of a node: lanes of its engine, threads of its host, the link to the other side.

A lane is one sequence's place in the engine's steps: launches on several lanes are batched, and slow each other down as
units of one memory do. A host unit is one thread, on cores of its own where those are given.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from paceline.core.zone import Zone
from paceline.workflow.builder import WorkflowModels
from paceline.workflow.units import ProcessingUnit

T = TypeVar("T")
ENGINE: Final = "engine"  # kind of a lane
HOST: Final = "cpu"
LINK: Final = "link"
LANES: Final = 4  # of an engine, by default
SEARCHES: Final = 4  # at once, of the other side: a mute one takes seconds


@dataclass(frozen=True, slots=True)
class HostUnit:
    """A thread for work without a language model. cores: the only ones it runs on; empty: wherever there is time."""

    name: str
    cores: frozenset[int] = frozenset()


@dataclass(slots=True)
class UnitRegistry:
    """All units of one node. `close` ends the threads.

    linked: there is another side, whose documents can be searched; web: pages can be searched for and fetched. Both are
    units that are waited for, and take none of this host's time.
    """

    zone: Zone
    lanes: int = LANES
    hosts: Sequence[HostUnit] = (HostUnit("cpu"),)
    models: WorkflowModels = field(default_factory=WorkflowModels)
    web: bool = False
    units: tuple[ProcessingUnit, ...] = field(init=False)
    _threads: dict[str, ThreadPoolExecutor] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for cores that this process may not use."""
        names = self.models
        generating = frozenset({names.agent, names.chat})
        searching = frozenset({names.embed, names.rerank, names.host})
        allowed = os.sched_getaffinity(0)
        if wrong := {core for host in self.hosts for core in host.cores} - allowed:
            raise ValueError(f"this process may not run on the cores {sorted(wrong)}; it may on {sorted(allowed)}")
        self.units = (
            *(ProcessingUnit(host.name, HOST, searching, self.zone, "host") for host in self.hosts),
            *(ProcessingUnit(f"engine {n}", ENGINE, generating, self.zone, "engine") for n in range(self.lanes)),
            *(ProcessingUnit(f"link {n}", LINK, frozenset({names.far}), "cloud", "far") for n in range(SEARCHES)),
            *((ProcessingUnit("web", "web", frozenset({names.web}), "cloud", "web"),) if self.web else ()),
        )
        self._threads = {
            host.name: ThreadPoolExecutor(1, f"unit {host.name}", initializer=_pin, initargs=(host.cores,))
            for host in self.hosts
        }

    async def run(self, unit: str, work: Callable[[], T]) -> T:
        """Call `work` on a host unit's thread. Cancelled, it runs to its end there and its result is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[unit], work)

    def close(self) -> None:
        """Drop what waits for the threads; what they are at ends by itself."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _pin(cores: frozenset[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
