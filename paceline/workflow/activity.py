"""Launches under way: how much of each is left, the bandwidth they ask for together, and when they end.

A launch first moves its data, then computes; computing advances at 1 ÷ slowdown of its pace (eq. 1 and 2), where the
slowdown follows the bandwidth that all launches on one memory ask for. Used by the scheduler with what profiles
predict; a simulator may use it with what is true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.workflow.events import Launch
from paceline.workflow.regression import Slowdown


@dataclass(slots=True)
class Running:
    """A launch under way."""

    launch: Launch
    memory: str
    bandwidth: float  # GB/s, while computing
    slowdown: Slowdown
    transfer_s: float  # left
    compute_s: float  # left, alone on the memory
    began: float  # s

    def left(self, used: float) -> float:
        """Seconds to the end while so many GB/s are used."""
        return self.transfer_s + self.compute_s * self.slowdown.at(used)

    def advance(self, seconds: float, used: float) -> None:
        moving = min(seconds, self.transfer_s)
        self.transfer_s -= moving
        self.compute_s = max(0.0, self.compute_s - (seconds - moving) / self.slowdown.at(used))


class Activity:
    """All launches under way, by id."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._now = -math.inf

    def __bool__(self) -> bool:
        return bool(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    def __contains__(self, launch: int) -> bool:
        return launch in self._running

    def add(self, running: Running) -> None:
        self._running[running.launch.id] = running

    def remove(self, launch: int) -> Running:
        return self._running.pop(launch)

    def used(self, memory: str) -> float:
        """GB/s that launches on a memory ask for. One that still moves its data counts: it will ask soon."""
        return sum(each.bandwidth for each in self._running.values() if each.memory == memory)

    def advance(self, now: float) -> None:
        """Let time pass. Launches that should have ended stay, with nothing left, until they are removed."""
        if self._now < now and self._running and self._now > -math.inf:
            used = {each.memory: self.used(each.memory) for each in self._running.values()}
            for each in self._running.values():
                each.advance(now - self._now, used[each.memory])
        self._now = max(self._now, now)

    def end(self, running: Running) -> float:
        """When a launch will end, if nothing else changes."""
        return self._now + running.left(self.used(running.memory))
