"""Launches under way: how much of each is left, the bandwidth they ask for together, and when they end.

A launch first moves its data, then computes; computing advances at 1 ÷ slowdown of its pace (eq. 1 and 2), where the
slowdown follows the bandwidth that all launches on one memory ask for. Used by the scheduler with what profiles
predict; a simulator may use it with what is true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.workflow.graph import Launch

# Regression with non-negative coefficients, and slowdowns that rise with the bandwidth in use.
#
# A slowdown is 1 plus a non-negative combination of ramps between knots: that is every piecewise linear function that
# never falls, so fitting it by non-negative least squares is isotonic regression (specs 3.1).


Array = NDArray[np.float64]


def nonnegative_least_squares(matrix: Array, values: Array) -> Array:
    """Minimise |matrix · x - values| over x >= 0 (Lawson and Hanson 1974, chapter 23).

    matrix: (samples, features); values: (samples,). Returns (features,).
    """
    features = matrix.shape[1]
    found = np.zeros(features)
    free = np.zeros(features, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ values).max(initial=0.0)))
    for _ in range(10 * features + 10):
        gradient = matrix.T @ (values - matrix @ found)
        if free.all() or gradient[~free].max() <= tolerance:
            break
        free[int(np.argmax(np.where(free, -np.inf, gradient)))] = True
        while True:
            trial = np.zeros(features)
            trial[free] = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
            wrong = free & (trial <= 0.0)
            if not wrong.any():
                break
            step = float(np.min(found[wrong] / (found[wrong] - trial[wrong] + 1e-300)))
            found = found + step * (trial - found)
            free &= found > 1e-12
            if not free.any():
                trial = np.zeros(features)
                break
        found = trial
    return np.maximum(found, 0.0)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Factor on a launch's seconds by the bandwidth that all launches on its memory ask for (phi of eq. 1).

    1 up to the first knot, linear between knots; beyond the last one, the last slope goes on.
    """

    knots: tuple[float, ...] = ()  # GB/s, rising
    factors: tuple[float, ...] = ()  # at the knots; the first is 1, none is below the one before

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.knots))
        monotone = all(a <= b for a, b in pairwise((1.0, *self.factors)))
        begins = not self.factors or self.factors[0] == 1.0
        if len(self.knots) != len(self.factors) or not (rising and monotone and begins):
            raise ValueError("a slowdown has rising knots and factors that begin at 1 and do not fall")

    def at(self, bandwidth: float) -> float:
        """Factor at so many GB/s."""
        knots, factors = self.knots, self.factors
        if not knots or bandwidth <= knots[0]:
            return 1.0
        i = 1
        while i < len(knots) - 1 and bandwidth > knots[i]:
            i += 1
        if i >= len(knots):
            return factors[-1]
        slope = (factors[i] - factors[i - 1]) / (knots[i] - knots[i - 1])
        return factors[i - 1] + slope * (bandwidth - knots[i - 1])


def fit_slowdown(samples: Sequence[tuple[float, float]], knots: Sequence[float]) -> Slowdown:
    """Slowdown that fits samples of (GB/s, factor) best. knots: GB/s, rising; at least two."""
    used = np.array([bandwidth for bandwidth, _ in samples])
    ramps = [
        np.maximum((used - low) / (high - low), 0.0)
        if high == knots[-1]
        else np.clip((used - low) / (high - low), 0.0, 1.0)
        for low, high in pairwise(knots)
    ]
    above = np.array([factor for _, factor in samples]) - 1.0
    rises = nonnegative_least_squares(np.stack(ramps, axis=1), above)
    factors = (1.0, *(1.0 + float(total) for total in np.cumsum(rises)))
    return Slowdown(tuple(map(float, knots)), factors)


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
