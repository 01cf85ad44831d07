"""What a side knows of speeds: decode time over position, forwards by rows, delays of the link, acceptance.

Fed with plain numbers by a caller who has a clock; there is none inside. Everything answers from the first moment, with
a prior that measurements replace.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.estimation.running import LineFit, MovingAverage, RecentMedian

WINDOW = 10  # steps that are compared with each other to find outliers
SPREAD = 0.9  # standard deviations within which a step is believed
FITTED = 3 * WINDOW  # steps before a line is fitted
MOST_ROWS = 64  # larger forwards are prefills, not steps of drafting
MAX_OBSERVATIONS = 100  # forwards of one row count: more make it no better known than that
RECENT = 5  # steps whose median is believed: two stalls among them change nothing


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """How fast a side decodes at its present position: what it tells the other side."""

    decode_s: float  # one forward of one row
    row_s: float = 0.0  # what each further row adds

    def forward(self, rows: int) -> float:
        return self.decode_s + self.row_s * (max(rows, 1) - 1)


# Before anything is measured: a small model on a laptop; a row more costs a hundredth of the first.
PRIOR = DecodeSpeed(0.04, 0.0004)


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one decode step: intercept + slope * position."""

    intercept: float
    slope: float

    def at(self, position: float) -> float:
        return self.intercept + self.slope * position


def inliers(seconds: Sequence[float], window: int = WINDOW, spread: float = SPREAD) -> list[int]:
    """Indices of what is no outlier: in each window of steps, |value - mean| < spread * standard deviation.

    Where all values of a window are alike, all are kept.
    """
    kept = []
    for start in range(0, len(seconds), window):
        part = seconds[start : start + window]
        mean, deviation = statistics.fmean(part), statistics.pstdev(part)
        alike = deviation <= 1e-9 * abs(mean)
        kept += [start + i for i, value in enumerate(part) if alike or abs(value - mean) < spread * deviation]
    return kept


def fit_line(steps: Sequence[tuple[int, float]]) -> Line:
    """Least squares through (position, seconds) of the steps that are believed.

    Neither part is negative: where the fit says so, that part is 0 and the other is fitted alone, so that a few noisy
    steps do not promise that long texts are free. Raises ValueError for no steps.
    """
    if not steps:
        raise ValueError("a line needs steps")
    kept = [steps[i] for i in inliers([seconds for _, seconds in steps])] or list(steps)
    fit = LineFit()
    for position, seconds in kept:
        fit.add(position, seconds)
    intercept = fit.at(0.0)
    if intercept is None or fit.slope < 0.0:
        return Line(statistics.fmean(seconds for _, seconds in kept), 0.0)
    if intercept < 0.0:
        return Line(0.0, sum(x * y for x, y in kept) / sum(x * x for x, _ in kept))
    return Line(intercept, fit.slope)


@dataclass(slots=True)
class DecodeTime:
    """Seconds of a one-row step over position: a line fitted once, then kept true where the text is now.

    After the fit the intercept stays and the slope is c / d, with c <- memory c + (1 - memory) (seconds - intercept)
    position and d <- memory d + (1 - memory) position**2. With the authors' memory of 0.1 the newest step counts most;
    so a step enters as the median of the last few, which a stall does not move. A jump to another text is followed in
    a few steps.
    """

    prior: float = PRIOR.decode_s
    memory: float = 0.1
    _line: Line | None = None
    _steps: list[tuple[int, float]] = field(default_factory=list)  # until there are enough for a line
    _recent: list[tuple[int, float]] = field(default_factory=list)
    _joint: float = 0.0  # c
    _square: float = 0.0  # d

    def add(self, position: int, seconds: float) -> None:
        if self._recent and abs(position - self._recent[-1][0]) > WINDOW:
            self._recent.clear()  # another text: what its steps take says nothing of this one's
        self._recent = [*self._recent, (position, seconds)][-RECENT:]
        if self._line is None:
            self._steps.append((position, seconds))
            if len(self._steps) >= FITTED:
                self._begin(fit_line(self._steps))
            return
        typical = statistics.median(seconds for _, seconds in self._recent)
        self._joint = self.memory * self._joint + (1.0 - self.memory) * (typical - self._line.intercept) * position
        self._square = self.memory * self._square + (1.0 - self.memory) * position**2

    def at(self, position: int) -> float:
        """Never 0 or less, whatever was measured."""
        if self._line is None:
            found = statistics.median(seconds for _, seconds in self._recent) if self._recent else self.prior
        elif self._square > 0.0:
            found = self._line.intercept + self._joint / self._square * position
        else:
            found = self._line.at(position)
        return max(found, 1e-6)

    def _begin(self, line: Line) -> None:
        self._line = line
        position = max(position for position, _ in self._steps)
        self._joint, self._square = line.slope * position**2, float(position**2)
        self._steps.clear()


@dataclass(slots=True)
class ForwardTime:
    """T_forward(rows): seconds of one forward, learnt live for the few row counts that occur.

    More rows never take less: means that say otherwise are pooled (isotonic regression). Between measured counts the
    estimate is a straight line; beyond them it rises with the prior's cost of a row, scaled to what is measured.
    """

    prior: DecodeSpeed = PRIOR
    typical: Callable[[], MovingAverage | RecentMedian] = MovingAverage  # of the times of one row count
    most: int = MOST_ROWS
    _means: dict[int, MovingAverage | RecentMedian] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _fitted: list[tuple[int, float]] | None = None  # the last estimate; None: there are newer values

    def add(self, rows: int, seconds: float) -> None:
        """Prefills, more than `most` rows, are left out: their rows are bound by other things."""
        if 1 <= rows <= self.most:
            self._means.setdefault(rows, self.typical()).add(seconds)
            self._counts[rows] = min(self._counts.get(rows, 0) + 1, MAX_OBSERVATIONS)
            self._fitted = None

    def at(self, rows: int) -> float:
        """Never falls as rows grow, never 0 or less."""
        if self._fitted is None:
            self._fitted = self._points()
        points = self._fitted
        if not points:
            return self.prior.forward(rows)
        (low, low_s), (high, high_s) = points[0], points[-1]
        if rows <= low:
            return max(self._beyond(rows, low, low_s), 1e-6)
        if rows >= high:
            return max(self._beyond(rows, high, high_s), 1e-6)
        right = next(i for i, (count, _) in enumerate(points) if count >= rows)
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        return max(low_s + (high_s - low_s) * (rows - low) / (high - low), 1e-6)

    def speed(self, rows: int = 1) -> DecodeSpeed:
        """The straight line from one row to `rows`, or to sixteen where it is asked for one."""
        far = rows if rows > 1 else 16
        one = self.at(1)
        return DecodeSpeed(one, max(0.0, (self.at(far) - one) / (far - 1)))

    def _beyond(self, rows: int, known: int, seconds: float) -> float:
        """The prior's shape through the known point."""
        return seconds * self.prior.forward(rows) / self.prior.forward(known)

    def _points(self) -> list[tuple[int, float]]:
        """(rows, seconds), neither decreasing: pool adjacent violators, a mean weighing as many values as it saw."""
        pools: list[tuple[list[int], float, int]] = []  # (row counts, mean, weight)
        for rows in sorted(self._means):
            mean, weight, counts = self._means[rows].value or 0.0, self._counts[rows], [rows]
            while pools and pools[-1][1] > mean:
                others, theirs, heavy = pools.pop()
                mean = (mean * weight + theirs * heavy) / (weight + heavy)
                counts, weight = others + counts, weight + heavy
            pools.append((counts, mean, weight))
        return [(rows, mean) for counts, mean, _ in pools for rows in counts]


@dataclass(slots=True)
class TimingModel:
    """How fast one side is: fed with every drafting forward, asked for the pace it has now."""

    forward: ForwardTime = field(default_factory=ForwardTime)
    decode: DecodeTime = field(default_factory=DecodeTime)

    def add(self, position: int, rows: int, seconds: float) -> None:
        """A forward of `rows` rows, `position` rows cached before it."""
        if not 1 <= rows <= MOST_ROWS or seconds <= 0.0:
            return
        self.forward.add(rows, seconds)
        # What one row alone would have taken, so that one line holds for steps of any width.
        self.decode.add(position, seconds * self.forward.at(1) / self.forward.at(rows))

    def speed(self, position: int, rows: int = 1) -> DecodeSpeed:
        """For texts of `position` tokens, forwards of about `rows` rows: rows cost in proportion to the first."""
        shape, one = self.forward.speed(rows), self.decode.at(position)
        return DecodeSpeed(one, shape.row_s * one / shape.decode_s)


@dataclass(slots=True)
class AcceptanceRate:
    """Share of a side's drafts that targets agreed with: a mean that forgets, from a prior worth a few tokens.

    The prior is what two sides with documents on one question reach about; `strength` 0 and `memory` 1 make it the
    accumulated mean of the paper (the prior then only stands in for the first value).
    """

    prior: float = 0.75
    strength: float = 4.0  # tokens the prior counts as
    memory: float = 0.98  # what a token keeps of its weight per newer one: about the last 50 count
    _sum: float = field(init=False, default=0.0)
    _count: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._sum, self._count = self.prior * self.strength, self.strength

    def add(self, accepted: bool) -> None:
        self._sum = self.memory * self._sum + accepted
        self._count = self.memory * self._count + 1.0

    @property
    def value(self) -> float:
        """In [0, 1]."""
        return self._sum / self._count if self._count else self.prior


@dataclass(slots=True)
class Delays:
    """Round trip and one-way delays, from messages that are answered and say when.

    `add` takes the four times of an exchange, two of either clock (RFC 5905, section 8). The clocks' offset is taken
    from the fastest exchange, as if its two ways had been equally long: what is asymmetric always cannot be told from
    an offset, what varies is told apart. Clocks that drift apart need a new one of these from time to time.
    """

    weight: float = 0.2  # of the newest exchange
    _round_trip: MovingAverage = field(init=False)
    _out: MovingAverage = field(init=False)
    _fastest: float = field(init=False, default=math.inf)
    _offset: float = field(init=False, default=0.0)  # the other clock minus ours

    def __post_init__(self) -> None:
        self._round_trip, self._out = MovingAverage(self.weight), MovingAverage(self.weight)

    def add(self, sent: float, received: float, answered: float, back: float) -> None:
        """`sent` and `back` on our clock, `received` and `answered` on theirs. One that cannot be is left out."""
        round_trip = (back - sent) - (answered - received)
        if not 0.0 <= round_trip < math.inf or answered < received:
            return
        if round_trip < self._fastest:
            self._fastest, self._offset = round_trip, ((received - sent) + (answered - back)) / 2.0
        self._round_trip.add(round_trip)
        self._out.add(received - sent)

    @property
    def round_trip(self) -> float | None:
        """Smoothed; None before the first exchange."""
        return self._round_trip.value

    @property
    def out(self) -> float | None:
        """From us to them."""
        there, whole = self._out.value, self.round_trip
        return None if there is None or whole is None else min(max(there - self._offset, 0.0), whole)

    @property
    def back(self) -> float | None:
        """From them to us."""
        out, whole = self.out, self.round_trip
        return None if out is None or whole is None else whole - out
