"""Running estimates from measurements: averages and medians, bandwidth, patience, times of forwards."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

# Running estimates: means and medians of measured values. No clock: the caller supplies the numbers.


@dataclass(slots=True)
class MovingAverage:
    """Exponentially weighted mean, with the bias correction of Adam (Kingma and Ba 2015)."""

    weight: float = 0.1  # of the newest value, in (0, 1]
    _sum: float = 0.0
    _share: float = 0.0  # sum of the weights so far

    def add(self, value: float) -> None:
        self._sum += self.weight * (value - self._sum)
        self._share += self.weight * (1.0 - self._share)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self._sum / self._share if self._share else None


@dataclass(slots=True)
class RecentMedian:
    """Median of the last few values, robust against stalls."""

    size: int = 9
    _values: deque[float] = field(default_factory=deque)

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) > self.size:
            self._values.popleft()

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return median(self._values) if self._values else None


# Bandwidth of a link, estimated by the sender from acknowledged bytes as in TCP congestion control (BBR: Cardwell et
# al. 2016).
#
# A link keeps order, so what was sent before a ping has arrived when its answer comes. The rate of acknowledged bytes
# is the bandwidth only while the link is full, that is, while round trips take longer than the least one. There is no
# estimate until a queue has built up. No clock: the caller supplies times.


QUEUED = 1.5  # a round trip above this multiple of the least one,
QUEUED_S = 0.02  # and longer by this many seconds, has waited in a queue
MAX_PINGS = 64  # unanswered pings kept


class Bandwidth:
    """One direction of one link."""

    def __init__(self) -> None:
        self._sent = 0  # bytes in total
        self._pings: dict[float, int] = {}  # time sent → bytes sent before
        self._acknowledged: tuple[float, int] | None = None  # time of the last answer, and the bytes it acknowledged
        self._min_trip: float | None = None  # s, round trip without queueing
        self._rate = MovingAverage(0.3)
        self._full = False
        self._resumed = -math.inf  # when the first bytes after an idle time were sent

    @property
    def rate(self) -> float | None:
        """Bytes per second; None while the link is not full."""
        return self._rate.value if self._full else None

    def sent(self, num_bytes: int, now: float | None = None) -> None:
        """Record bytes sent. Without a time, the sender is taken to have had something to send all the while."""
        if now is not None and self._acknowledged is not None and self._acknowledged[1] == self._sent:
            self._resumed = now
        self._sent += num_bytes

    def pinged(self, now: float) -> None:
        if len(self._pings) < MAX_PINGS:
            self._pings[now] = self._sent

    def answered(self, sent_at: float, now: float, held: float = 0.0) -> None:
        """Record the answer to the ping of `sent_at`, which the peer held back for `held` seconds."""
        acknowledged = self._pings.pop(sent_at, None)
        if acknowledged is None:
            return
        trip = max(now - sent_at - held, 0.0)
        before, self._acknowledged = self._acknowledged, (now, acknowledged)
        was_idle = before is not None and acknowledged == before[1]
        if self._min_trip is None or was_idle or trip < self._min_trip:
            self._min_trip = trip  # a ping on an idle link measures the present route
        full = trip > QUEUED * self._min_trip and trip > self._min_trip + QUEUED_S
        if full and before is not None and acknowledged > before[1]:
            # The time in which a sender had nothing to send says nothing of the link.
            began = max(before[0], self._resumed + self._min_trip)
            if now > began:
                self._rate.add((acknowledged - before[1]) / (now - began))
        self._full = full and self._rate.value is not None


# How long an answer waits for the other side of it, and what of that is remembered for the next answer.


PACES = 8  # gaps between an answer's deliveries that a peer may let pass
SILENCE_S = 1.0  # of the link; a live peer answers at once, whatever its engine does
# Without a target while the link lives: where a third of the messages is lost, it takes that long to have what is
# missing sent again, and a peer short of memory has its turns.
STALL_S = 15.0
AGAIN_S = 5.0  # likewise, of a peer that has not contributed in an earlier answer
FIRST_S = 20.0  # likewise before its pace is known: a peer may have a long prompt to read
LONGEST_FIRST_S = 60.0


@dataclass(slots=True)
class DeliveryPace:
    """Mean gap between deliveries of one answer, seconds. What arrives at one time is one delivery."""

    _gaps: MovingAverage = field(default_factory=lambda: MovingAverage(0.2))
    _last: float | None = None

    def delivered(self, now: float) -> None:
        if self._last is not None:
            self._gaps.add(max(now - self._last, 0.0))
        self._last = now

    def interrupt(self) -> None:
        """The gap before the next delivery says nothing about the pace."""
        self._last = None

    def allows(self, least: float, rtt: float | None) -> float:
        """Longest wait, seconds. rtt: s; its own answers take a peer as long."""
        return max(least, PACES * (self._gaps.value or 0.0)) + (rtt or 0.0)


@dataclass(slots=True)
class PeerRecord:
    """Longest wait for a peer before its pace in an answer is known, over all answers with this peer.

    It may have to read a long prompt, so the wait is long. A peer that let it pass gets a short one, until it takes
    part again.
    """

    first_s: float = FIRST_S

    def took_part(self, waited: float) -> None:
        """waited: s, for one of its first targets."""
        self.first_s = min(max(FIRST_S, 2.0 * waited), LONGEST_FIRST_S)

    def did_not(self) -> None:
        self.first_s = AGAIN_S


# Timing estimates: decode time over position, forward time over rows, link delays, acceptance rates.
#
# No clock: the caller supplies measurements. Every estimate has a value from the start, a prior that measurements
# replace.


WINDOW = 10  # steps compared with each other to find outliers
SPREAD = 0.9  # standard deviations within which a step is an inlier
FITTED = 3 * WINDOW  # steps before a line is fitted
MAX_ROWS = 64  # larger forwards are prefills, not drafting steps
MAX_OBSERVATIONS = 100  # cap on the weight of one row count, in forwards
RECENT = 5  # steps in the median: two stalls among them do not change it


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Decode speed of a side at its present position, as it is sent to the other side."""

    decode_s: float  # of a forward of one row
    row_s: float = 0.0  # added by each further row

    def forward(self, rows: int) -> float:
        return self.decode_s + self.row_s * (max(rows, 1) - 1)


# A small model on a laptop; each further row costs a hundredth of the first.
PRIOR = DecodeSpeed(0.04, 0.0004)


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of one decode step: intercept + slope * position."""

    intercept: float
    slope: float

    def at(self, position: float) -> float:
        return self.intercept + self.slope * position


def inliers(seconds: Sequence[float], window: int = WINDOW, spread: float = SPREAD) -> list[int]:
    """Indices of values that are not outliers: in each window, |value - mean| < spread * standard deviation.

    If all values of a window are equal, all are kept.
    """
    kept = []
    for start in range(0, len(seconds), window):
        part = seconds[start : start + window]
        mean, deviation = statistics.fmean(part), statistics.pstdev(part)
        equal = deviation <= 1e-9 * abs(mean)
        kept += [start + i for i, value in enumerate(part) if equal or abs(value - mean) < spread * deviation]
    return kept


def fit_line(steps: Sequence[tuple[int, float]]) -> Line:
    """Least squares through the inliers among (position, seconds).

    Neither coefficient is negative: one that would be is set to 0 and the other fitted alone, so that a few noisy steps
    do not predict that long texts cost nothing. Raises ValueError for no steps.
    """
    if not steps:
        raise ValueError("a line needs steps")
    kept = [steps[i] for i in inliers([seconds for _, seconds in steps])] or list(steps)
    positions, times = zip(*kept, strict=True)
    slope, intercept = statistics.linear_regression(positions, times) if len({*positions}) > 1 else (0.0, 0.0)
    if slope <= 0.0:
        return Line(statistics.fmean(times), 0.0)
    if intercept < 0.0:
        return Line(0.0, sum(x * y for x, y in kept) / sum(x * x for x, _ in kept))
    return Line(intercept, slope)


@dataclass(slots=True)
class DecodeTime:
    """Seconds of a one-row step over position: a line fitted once, then updated at the current position.

    After the fit the intercept stays and the slope is c / d, with c <- memory c + (1 - memory) (seconds - intercept)
    position and d <- memory d + (1 - memory) position**2. With the authors' memory of 0.1 the newest step has most of
    the weight, so each step enters as the median of the last few, which a stall does not change. A jump to another text
    is followed within a few steps.
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
            self._recent.clear()  # another text: the earlier steps do not apply
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
        """Seconds at `position`, always above 0."""
        if self._line is None:
            seconds = statistics.median(seconds for _, seconds in self._recent) if self._recent else self.prior
        elif self._square > 0.0:
            seconds = self._line.intercept + self._joint / self._square * position
        else:
            seconds = self._line.at(position)
        return max(seconds, 1e-6)

    def _begin(self, line: Line) -> None:
        self._line = line
        position = max(position for position, _ in self._steps)
        self._joint, self._square = line.slope * position**2, float(position**2)
        self._steps.clear()


@dataclass(slots=True)
class ForwardTime:
    """T_forward(rows): seconds of one forward, measured for the few row counts that occur.

    Non-decreasing in rows: means that violate this are pooled (isotonic regression). Linear between measured row
    counts; beyond them it rises with the prior's cost of a row, scaled to the nearest measurement.
    """

    prior: DecodeSpeed = PRIOR
    average: Callable[[], MovingAverage | RecentMedian] = MovingAverage  # of the times of one row count
    max_rows: int = MAX_ROWS
    _means: dict[int, MovingAverage | RecentMedian] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _fitted: list[tuple[int, float]] | None = None  # cached `_points`; None: outdated

    def add(self, rows: int, seconds: float) -> None:
        """Record a forward. Prefills, above `max_rows`, are ignored: their rows have another bottleneck."""
        if 1 <= rows <= self.max_rows:
            self._means.setdefault(rows, self.average()).add(seconds)
            self._counts[rows] = min(self._counts.get(rows, 0) + 1, MAX_OBSERVATIONS)
            self._fitted = None

    def at(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows: non-decreasing in rows, always above 0."""
        if self._fitted is None:
            self._fitted = self._points()
        points = self._fitted
        if not points:
            return self.prior.forward(rows)
        (low, low_s), (high, high_s) = points[0], points[-1]
        if rows <= low:
            return max(self._extrapolate(rows, low, low_s), 1e-6)
        if rows >= high:
            return max(self._extrapolate(rows, high, high_s), 1e-6)
        right = next(i for i, (count, _) in enumerate(points) if count >= rows)
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        return max(low_s + (high_s - low_s) * (rows - low) / (high - low), 1e-6)

    def speed(self, rows: int = 1) -> DecodeSpeed:
        """The straight line from one row to `rows`, or to sixteen if `rows` is 1."""
        end = rows if rows > 1 else 16
        one = self.at(1)
        return DecodeSpeed(one, max(0.0, (self.at(end) - one) / (end - 1)))

    def _extrapolate(self, rows: int, known: int, seconds: float) -> float:
        """Extrapolate with the prior's shape from a measured row count."""
        return seconds * self.prior.forward(rows) / self.prior.forward(known)

    def _points(self) -> list[tuple[int, float]]:
        """(rows, seconds), both non-decreasing: pool adjacent violators, means weighted by their numbers of values."""
        pools: list[tuple[list[int], float, int]] = []  # (row counts, mean, weight)
        for rows in sorted(self._means):
            mean, weight, counts = self._means[rows].value or 0.0, self._counts[rows], [rows]
            while pools and pools[-1][1] > mean:
                last_counts, last_mean, last_weight = pools.pop()
                mean = (mean * weight + last_mean * last_weight) / (weight + last_weight)
                counts, weight = last_counts + counts, weight + last_weight
            pools.append((counts, mean, weight))
        return [(rows, mean) for counts, mean, _ in pools for rows in counts]


@dataclass(slots=True)
class TimingModel:
    """Timing of one side, from its drafting forwards."""

    forward: ForwardTime = field(default_factory=ForwardTime)
    decode: DecodeTime = field(default_factory=DecodeTime)

    def add(self, position: int, rows: int, seconds: float) -> None:
        """Record a forward of `rows` rows behind `position` cached rows."""
        if not 1 <= rows <= MAX_ROWS or seconds <= 0.0:
            return
        self.forward.add(rows, seconds)
        # Scaled to one row, so that one line fits steps of any width.
        self.decode.add(position, seconds * self.forward.at(1) / self.forward.at(rows))

    def speed(self, position: int, rows: int = 1) -> DecodeSpeed:
        """Speed at `position` tokens for forwards of about `rows` rows; the cost of a row scales with that of the
        first."""
        shape, one = self.forward.speed(rows), self.decode.at(position)
        return DecodeSpeed(one, shape.row_s * one / shape.decode_s)


@dataclass(slots=True)
class AcceptanceRate:
    """Acceptance rate of a side's drafts: an exponentially weighted mean with a prior worth a few tokens.

    The prior is about the rate that two sides with documents on one question reach; `strength` 0 and `memory` 1 give
    the accumulated mean of the paper (the prior then is only the value before the first token).
    """

    prior: float = 0.75
    strength: float = 4.0  # weight of the prior, in tokens
    memory: float = 0.98  # factor on a token's weight per newer token: about the last 50 count
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
