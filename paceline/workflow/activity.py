"""Launches under way: how much of each is left, the bandwidth they ask for together, and when they end.

A launch first moves its data, then computes; computing advances at 1 ÷ slowdown of its pace (eq. 1 and 2), where the
slowdown follows the bandwidth that all launches on one memory ask for. Used by the scheduler with what profiles
predict; a simulator may use it with what is true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from paceline.workflow.events import Launch
from paceline.workflow.regression import Slowdown


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of a launch other launches on its memory ran beside."""

    share: float = 0.0  # of its time, 0 to 1
    bandwidth: float = 0.0  # GB/s that the others asked for, mean over its time


ALONE = Overlap()


@dataclass(slots=True, kw_only=True)
class Other:
    """Work under way on a memory: a launch, or what nobody schedules."""

    memory: str
    bandwidth: float  # GB/s, while computing
    began: float  # s
    beside_s: float = 0.0  # in which others ran
    beside_gb: float = 0.0  # that they asked for

    def overlap(self, now: float) -> Overlap:
        """With other work, up to now."""
        seconds = now - self.began
        return Overlap(min(1.0, self.beside_s / seconds), self.beside_gb / seconds) if seconds > 0.0 else ALONE


@dataclass(slots=True, kw_only=True)
class Running(Other):
    """A launch under way."""

    launch: Launch
    slowdown: Slowdown
    transfer_s: float  # left
    compute_s: float  # left, alone on the memory
    moving_s: float = 0.0  # of moving its data, all of it: no part of what it takes there

    def left(self, used: float) -> float:
        """Seconds to the end while so many GB/s are used."""
        return self.transfer_s + self.compute_s * self.slowdown.at(used)

    def advance(self, seconds: float, used: float) -> None:
        moving = min(seconds, self.transfer_s)
        self.transfer_s -= moving
        self.compute_s = max(0.0, self.compute_s - (seconds - moving) / self.slowdown.at(used))


class Activity:
    """All launches under way, by id, and the other work beside them: only launches are iterated over and counted."""

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        self._others: dict[int, Other] = {}
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

    def add_other(self, number: int, other: Other) -> None:
        self._others[number] = other

    def remove_other(self, number: int) -> Other:
        return self._others.pop(number)

    def used(self, memory: str) -> float:
        """GB/s that work on a memory asks for. A launch that still moves its data counts: it will ask soon."""
        return sum(each.bandwidth for each in self._all() if each.memory == memory)

    def advance(self, now: float) -> None:
        """Let time pass. Launches that should have ended stay, with nothing left, until they are removed."""
        if self._now < now and self._now > -math.inf:
            counts = Counter(each.memory for each in self._all())
            used = {memory: self.used(memory) for memory in counts}
            for running in self._running.values():
                running.advance(now - self._now, used[running.memory])
            for each in self._all():
                if counts[each.memory] > 1:
                    each.beside_s += now - self._now
                    each.beside_gb += (now - self._now) * max(0.0, used[each.memory] - each.bandwidth)
        self._now = max(self._now, now)

    def end(self, running: Running) -> float:
        """When a launch will end, if nothing else changes."""
        return self._now + running.left(self.used(running.memory))

    def _all(self) -> Iterator[Other]:
        return chain(self._running.values(), self._others.values())
