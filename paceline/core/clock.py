"""Expectations from measurements: seconds of a step by its rows, of a link, of a peer; acceptance of drafts.

What holds of `StepClock`: more rows never take less, estimates reach a constant truth, one outlier changes nothing, and
all of them are above 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Final


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


# Seconds of a step by its rows.
#
# No line is assumed: on a GPU rows are free until there are many, on a CPU each has its price, and beside both stands
# what the caller does for a row until its step counts as done. Times of sizes alike are taken together, by their
# median; these are made to rise with the rows (pool adjacent violators), and joined.


RECENT: Final = 9  # steps of a size that are kept
NEAR: Final = 1.35  # ratio of a number of rows to the nearest size, for its time to count as known
_EXACT: Final = 15  # rows up to which each is a size of its own
_FEW: Final = 3  # steps of a size, with which what they take counts as known


def row_class(rows: int) -> int:
    """The smallest number of rows of a class, whose sizes differ by less than an eighth; up to 15 each is one."""
    shift = max(0, rows.bit_length() - 4)
    return (rows >> shift) << shift


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """A straight line of seconds by rows, as it is sent to the other side."""

    decode_s: float  # of a forward of one row
    row_s: float = 0.0  # added by each further row

    def forward(self, rows: float) -> float:
        return self.decode_s + self.row_s * (max(rows, 1.0) - 1.0)


# A small model on a laptop; each further row costs a hundredth of the first.
PRIOR: Final = DecodeSpeed(0.04, 0.0004)


@dataclass(slots=True)
class StepClock:
    """Seconds of steps, from the last ones of each size."""

    prior: DecodeSpeed = PRIOR  # before anything is known; its shape, while one size alone is
    max_rows: int = 1024  # larger steps are prefills, whose rows have another bottleneck: they are ignored
    keeps: int = RECENT  # steps of a size
    # Steps after which a size seen often enough is forgotten, the sooner the less it was seen, until it is seen again.
    remembers: int | None = None
    _steps: int = 0
    _seen: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)  # by class: rows and seconds
    _last: dict[int, int] = field(default_factory=dict)  # by class: the last step of it
    _median: dict[int, float] = field(default_factory=dict)  # by class: s
    _curve: list[tuple[float, float]] | None = None  # rows and seconds, neither falls; None: stale
    _known: dict[int, float] = field(default_factory=dict)  # by rows: seconds that were asked for, of this curve

    def add(self, rows: int, seconds: float) -> float:
        """Record a step. Returns what the last ones of its size took in the median, with this one."""
        if not 1 <= rows <= self.max_rows or seconds <= 0.0:
            return seconds
        self._steps += 1
        size = row_class(rows)
        seen = self._seen.get(size)
        if seen is None:
            seen = self._seen[size] = deque(maxlen=self.keeps)
        seen.append((rows, seconds))
        self._last[size] = self._steps
        taken = sorted(seconds for _, seconds in seen)[(len(seen) - 1) // 2]
        if taken != self._median.get(size) or self.remembers is not None or size > _EXACT:
            self._median[size], self._curve = taken, None
        return taken

    def __bool__(self) -> bool:
        """True once anything was recorded."""
        return bool(self._seen)

    @property
    def most_rows(self) -> int:
        """Rows of the largest steps that are remembered; 0 for none."""
        curve = self._rising()
        return int(curve[-1][0]) if curve else 0

    def knows(self, rows: int) -> bool:
        """True if steps of about so many rows, or fewer, were seen, more than stalls are likely to be."""
        return any(
            len(seen) >= _FEW and seen[-1][0] <= 2 * rows
            for size, seen in self._seen.items()
            if self._is_remembered(size)
        )

    def near(self, rows: int) -> float | None:
        """Median seconds of the size that is nearest to so many rows; None if none is near."""
        size = self._nearest(rows)
        return None if size is None else self._median[size]

    def mean_near(self, rows: int, stall: float) -> float | None:
        """Mean seconds of that size, in which no step counts as more than `stall` medians; None if none is near."""
        size = self._nearest(rows)
        if size is None:
            return None
        seen, most = self._seen[size], stall * self._median[size]
        return sum(min(seconds, most) for _, seconds in seen) / len(seen)

    def at(self, rows: int) -> float:
        """Seconds of a step of so many rows, at least 1: above 0, and never less than of fewer."""
        if self._curve is None:
            self._rising()
        found = self._known.get(rows)
        if found is None:
            found = self._known[rows] = self._estimate(rows)
        return found

    def speed(self) -> DecodeSpeed:
        """The straight line from one row to sixteen."""
        one = self.at(1)
        return DecodeSpeed(one, max(0.0, (self.at(16) - one) / 15))

    def _nearest(self, rows: int) -> int | None:
        known, own = list(filter(self._is_remembered, self._seen)), row_class(rows)
        size = own if own in known else min(known, key=lambda each: max(rows / each, each / rows), default=None)
        return None if size is None or max(rows / size, size / rows) > NEAR else size

    def _estimate(self, rows: int) -> float:
        curve = self._rising()
        if not curve:
            return self.prior.forward(rows)
        (low, low_s), (high, high_s) = curve[0], curve[-1]
        if low < rows < high:
            place = bisect_left(curve, (rows, 0.0))
            (left, left_s), (right, right_s) = curve[place - 1], curve[place]
            return left_s + (right_s - left_s) * (rows - left) / (right - left)
        if low == high:
            return low_s * self.prior.forward(rows) / self.prior.forward(low)
        slope = (high_s - low_s) / (high - low)
        return high_s + slope * (rows - high) if rows >= high else max(low_s + slope * (rows - low), low_s * rows / low)

    def _rising(self) -> list[tuple[float, float]]:
        """Times of the sizes that are remembered. Neighbours that fall are replaced by their mean, weighted by the
        steps seen."""
        if self._curve is not None:
            return self._curve
        pools: list[tuple[float, int, list[float]]] = []  # seconds, weight, and the rows that have them
        for size in sorted(self._seen):
            if not self._is_remembered(size):
                continue
            seen = self._seen[size]
            seconds, weight = self._median[size], len(seen)
            rows = [float(size) if size <= _EXACT else sum(rows for rows, _ in seen) / weight]
            while pools and pools[-1][0] >= seconds:
                before, others, smaller = pools.pop()
                seconds = (before * others + seconds * weight) / (others + weight)
                weight, rows = others + weight, smaller + rows
            pools.append((seconds, weight, rows))
        self._curve = [(each, seconds) for seconds, _, rows in pools for each in rows]
        self._known.clear()
        return self._curve

    def _is_remembered(self, size: int) -> bool:
        if self.remembers is None:
            return True
        return self._steps - self._last[size] <= self.remembers * len(self._seen[size]) // self.keeps


# A link, as its sender knows it: the round trip, and the bandwidth from acknowledged bytes as in TCP congestion
# control (BBR: Cardwell et al. 2016).
#
# A link keeps order, so what was sent before a ping has arrived when its answer comes. The rate of acknowledged bytes
# is the bandwidth only while the link is full, that is, while round trips take longer than the least one, and by more
# than they vary on the idle link (radio). There is no estimate until a queue has built up.


QUEUED = 1.5  # a round trip above this multiple of the least one,
QUEUED_S = 0.02  # and longer by this many seconds, has waited in a queue
JITTERS = 4  # or by this many mean deviations on an idle link, if that is more; as in RFC 6298
MAX_PINGS = 64  # unanswered pings kept
LONGEST_TRIP_S = 3.0  # counts for longer ones: answers wait for a peer by its round trip, which it can draw out
RTT_WEIGHT, JITTER_WEIGHT = 1 / 8, 1 / 4  # of a new sample, as in RFC 6298


class LinkClock:
    """One direction of one link."""

    def __init__(self) -> None:
        self.rtt: float | None = None  # s, smoothed
        self._sent = 0  # bytes in total
        self._pings: dict[float, int] = {}  # time sent → bytes sent before
        self._acknowledged: tuple[float, int] | None = None  # time of the last answer, and the bytes it acknowledged
        self._min_trip: float | None = None  # s, round trip without queueing
        self._jitter = 0.0  # s, by which such trips differ
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
        """Record the answer to the ping of `sent_at`, which the peer held back for `held` seconds. What answers no ping
        tells nothing."""
        acknowledged = self._pings.pop(sent_at, None)
        if acknowledged is None:
            return
        trip = max(now - sent_at - max(held, 0.0), 0.0)
        told = min(trip, LONGEST_TRIP_S)
        self.rtt = told if self.rtt is None else self.rtt + RTT_WEIGHT * (told - self.rtt)
        before, self._acknowledged = self._acknowledged, (now, acknowledged)
        was_idle = before is not None and acknowledged == before[1] and sent_at >= before[0]
        if was_idle and self._min_trip is not None:
            self._jitter += JITTER_WEIGHT * (abs(trip - self._min_trip) - self._jitter)
        if self._min_trip is None or was_idle or trip < self._min_trip:
            self._min_trip = trip  # a ping on an idle link measures the present route
        queued_s = max(QUEUED_S, JITTERS * self._jitter)
        full = trip > QUEUED * self._min_trip and trip > self._min_trip + queued_s
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


# How often drafts are accepted, and what came of other things expected.


MAX_RANKS: Final = 8
MARGIN_FIRSTS: Final = (0.5, 0.65, 0.85, 0.97)  # prior acceptance rate of the first draft, by margin class
_STRENGTH: Final = 6.0  # weight of the prior, in observations
ACCEPTANCE_SLOPE: Final = 0.35  # 1/nat: acceptance is about exp(-0.35 H) in GELATO (eq. 10)
_SLOPES: Final = 0.02, 20.0  # least and highest, 1/nat
_SLOPE_MEMORY: Final = 0.995  # factor on older observations, per new one
_INFORMATION: Final = 20.0  # weight of the first slope, as Fisher information


@dataclass(slots=True)
class AcceptanceByRank:
    """P(the target is the draft of rank r | class), r from 0. By default a class is a `ngram_drafter.margin_class`.

    Slowly decaying weights, since the character of a text changes, beside a prior that stays: each rank after the first
    is half as likely as the one before; the remainder is none.
    """

    firsts: tuple[float, ...] = MARGIN_FIRSTS  # prior acceptance rate of the first draft, by class
    memory: float = 0.98  # factor on older observations, per new one: about the last fifty count
    _counts: list[list[float]] = field(init=False)
    _totals: list[float] = field(init=False)
    _known: dict[int, list[float]] = field(default_factory=dict)  # cached `probs`, by class

    def __post_init__(self) -> None:
        self._counts = [[0.0] * MAX_RANKS for _ in self.firsts]
        self._totals = [0.0] * len(self.firsts)

    def add(self, group: int, rank: int | None) -> None:
        """Record the rank of the target among the drafts; None: the target was not drafted."""
        self._known.pop(group, None)
        counts = self._counts[group]
        for place in range(MAX_RANKS):
            counts[place] *= self.memory
        self._totals[group] = self._totals[group] * self.memory + 1.0
        if rank is not None and rank < MAX_RANKS:
            counts[rank] += 1.0

    def probs(self, group: int) -> list[float]:
        """(MAX_RANKS,) sums to less than 1, because the target may not be drafted at all."""
        if group not in self._known:
            first, total = self.firsts[group], self._totals[group] + _STRENGTH
            prior = [first, *((1.0 - first) * 0.5**rank for rank in range(1, MAX_RANKS))]
            counts = self._counts[group]
            self._known[group] = [
                (count + _STRENGTH * share) / total for count, share in zip(counts, prior, strict=True)
            ]
        return self._known[group]


@dataclass(slots=True)
class AcceptanceByEntropy:
    """Acceptance of a draft, exp(-slope · H), fitted online by maximum likelihood (Fisher scoring with fading)."""

    slope: float = ACCEPTANCE_SLOPE  # 1/nat
    _information: float = _INFORMATION

    def add(self, nats: float, *, accepted: bool) -> None:
        """Record a draft that was examined. nats: entropy of the distribution it was drawn from."""
        if nats < 1e-6:
            return  # acceptance does not depend on the slope there
        exponent = self.slope * nats
        rejected = -math.expm1(-exponent)
        information = nats * nats * (1.0 - rejected) / rejected
        score = -nats if accepted else nats * (1.0 - rejected) / rejected
        self._information = _SLOPE_MEMORY * self._information + information
        low, high = _SLOPES
        self.slope = min(max(self.slope + score / self._information, low), high)


@dataclass(slots=True)
class Ratio:
    """Outcome by expectation, newer values counted more, beside a prior: accepted drafts of examined ones, or joules
    of predicted ones."""

    prior: float = 1.0
    strength: float = 0.0  # weight of the prior, in what was expected
    memory: float = 1.0  # factor on older values, per new one
    least: float = 0.0
    most: float = math.inf
    first: int = 0  # values before which the prior holds
    _expected: float = 0.0
    _came: float = 0.0
    _count: int = 0

    def add(self, expected: float, came: float) -> None:
        self._expected = self.memory * self._expected + expected
        self._came = self.memory * self._came + came
        self._count += 1

    @property
    def value(self) -> float:
        weight = self._expected + self.strength
        if self._count < self.first or weight <= 0.0:
            return self.prior
        return min(max((self._came + self.strength * self.prior) / weight, self.least), self.most)
