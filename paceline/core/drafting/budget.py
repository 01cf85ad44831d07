"""Does drafting pay, and how many rows of it: decided from what forwards took and what of them stood.

The decision is the papers' maximum of (1 + U(B)) / T(B) with both halves measured: T is the time from one answer of the
engine to the next, everything between included, over all rows that ran in that step; U is what the drafter promises
times the share of its promises that was kept. Beside it stands an account, so that no model of either can be wrong for
long: drafting may cost one hundredth of the time of plain steps, and what it has saved before. Fed with plain numbers;
no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from paceline.core.batching.segment import UNKNOWN, StepSize
from paceline.core.drafting.tree_search import best_budget
from paceline.core.estimation.running import RecentMedian
from paceline.core.estimation.timing import ForwardTime

MOST_ROWS: Final = 1024  # in one step, of all answers: more is a prefill
# Times are kept for these row counts: neighbours teach each other, and few are soon known.
CLASSES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
MEMORY: Final = 0.97  # of older promises, per new one
STRENGTH: Final = 2.0  # promised tokens that what was known before weighs
EARNED: Final = 0.01  # of a plain step, by each plain step: what drafting may lose
GRACE: Final = 1.0  # plain steps that the first drafts of all may lose
MOST_CREDIT: Final = 16.0  # plain steps, of what drafting has saved, that it may lose again
OWN_CREDIT: Final = 3.0  # plain steps of that which one answer may lose before it has saved any
LEAST_CREDIT: Final = -1.0  # plain steps: within a hundred of them drafts are tried again
MARGIN: Final = 1.02  # by which drafts must be expected to be faster
PLAIN_EVERY: Final = 100  # drafting steps, to know what a plain one takes now
FIRST_PLAIN: Final = 2  # plain steps before the first drafts on an engine that nothing is known of
FEWEST: Final = 6  # nodes of a tree that is built to see whether it pays
REFRESH: Final = 4  # steps between two looks at what steps take: a look costs as much as a small tree
SOON: Final = 2  # plain steps after a tree without a node
MANY: Final = 8  # such trees in a row: nothing repeats, and to find that out costs as well
RETRY: Final = 16  # plain steps between two attempts then, and while drafts do not pay
LONGER: Final = 32  # so many more such trees, of all answers: one RETRY more, as a tree takes a hundredth of a step
LONGEST: Final = 4  # times RETRY; no more often than this answer has built such trees itself


def step_class(rows: int) -> int:
    """The row count under which the time of a step is kept: the first in CLASSES that is not smaller."""
    return CLASSES[min(bisect_left(CLASSES, rows), len(CLASSES) - 1)]


@dataclass(slots=True)
class AcceptanceCalibration:
    """The share of promised tokens that stood. 1: a drafter's probabilities are right; it starts there."""

    calibration: float = 1.0
    _strength: float = STRENGTH
    _expected: float = 0.0
    _accepted: float = 0.0
    _before: float = 1.0

    def add(self, promised: float, stood: int) -> None:
        self._expected = MEMORY * self._expected + promised
        self._accepted = MEMORY * self._accepted + stood
        share = (self._accepted + self._strength * self._before) / (self._expected + self._strength)
        self.calibration = min(share, 4.0)

    def for_next_request(self) -> AcceptanceCalibration:
        """For the next answer: begins where this is."""
        return AcceptanceCalibration(self.calibration, _before=self.calibration)


@dataclass(slots=True)
class TimeCredit:
    """What drafting may lose, in plain steps: it earns what it saves, and plain steps earn a little for trials."""

    credit: float

    def plain(self, sharers: int) -> None:
        """sharers: answers of the same step that have this account too."""
        self.credit = min(self.credit + EARNED / sharers, MOST_CREDIT)

    def drafted(self, saved: float) -> None:
        """saved: plain steps; below 0 it was a loss."""
        self.credit = min(max(self.credit + saved, LEAST_CREDIT), MOST_CREDIT)


@dataclass(slots=True)
class BudgetStats:
    """What answers of one kind on one engine have taught about drafting: kept beyond them."""

    times: ForwardTime = field(default_factory=lambda: ForwardTime(typical=RecentMedian, most=MOST_ROWS))
    share: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
    measured: set[int] = field(default_factory=set)  # classes whose time is known
    plain: int = 0  # steps without drafts so far
    idle: int = 0  # trees in a row, of whatever answer, of which nothing was worth a row
    account: TimeCredit = field(default_factory=lambda: TimeCredit(GRACE))
    _heard: StepSize = UNKNOWN
    _new: int = 0  # steps since the estimates were made
    _seconds: dict[int, float] = field(default_factory=dict)  # by class

    def record_step(self, step: StepSize, seconds: float) -> None:
        """A step of all answers together: each of them may tell it, the first is heard. Prefills are left out."""
        if step is not self._heard and 1 <= step.rows <= MOST_ROWS and seconds > 0.0:
            self._heard = step
            rows = step_class(step.rows)
            self.times.add(rows, seconds)
            self._new += 1
            if rows not in self.measured or self._new >= REFRESH:
                self.measured.add(rows)
                self._seconds.clear()
                self._new = 0

    def seconds(self, rows: int) -> float:
        """Beyond what was measured: along the line through the narrowest and the widest step that was."""
        rows = step_class(rows)
        found = self._seconds.get(rows)
        if found is None:
            found = self._seconds[rows] = self._estimate(rows)
        return found

    def _estimate(self, rows: int) -> float:
        if len(self.measured) < 2 or rows <= max(self.measured):
            return self.times.at(rows)
        low, high = min(self.measured), max(self.measured)
        slope = (self.times.at(high) - self.times.at(low)) / (high - low)
        return self.times.at(high) + slope * (rows - high)

    def tried(self, sequences: int) -> int:
        """Drafts of each of so many answers of which a step has been measured, or would have been."""
        return max(0, max(self.measured, default=0) // sequences - 1)


class Budget(Protocol):
    """Says how many drafts a step takes."""

    def max_draft_tokens(self) -> int:
        """Drafts worth building a tree for now; 0: a plain step."""

    def choose(self, probs: Sequence[float]) -> int:
        """How many of the drafts that were built, best first, to verify. probs: (n,) that each is output."""

    def record(self, drafted: int, promised: float, stood: int, step: StepSize, seconds: float) -> None:
        """A step is answered: of `drafted` drafts `stood` were output. step: of the engine, other answers' rows
        included; one object for all of them. seconds: since the answer before."""

    @property
    def paused(self) -> bool:
        """No drafts are to be expected soon."""

    def stats(self) -> dict[str, float]: ...


class FixedBudget:
    """Always as many as there are, up to a number: baselines, and what the guard is compared with."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def max_draft_tokens(self) -> int:
        return self._rows

    def choose(self, probs: Sequence[float]) -> int:
        return min(len(probs), self._rows)

    def record(self, drafted: int, promised: float, stood: int, step: StepSize, seconds: float) -> None:
        """Nothing is learnt."""

    @property
    def paused(self) -> bool:
        return self._rows == 0

    def stats(self) -> dict[str, float]:
        return {}


class AdaptiveBudget:
    """Of one answer."""

    def __init__(self, record: BudgetStats, *, rows: int) -> None:
        """rows: drafts at most in one step."""
        self._record, self._rows = record, rows
        self._share = record.share.for_next_request()
        self._own = TimeCredit(OWN_CREDIT)
        self._sequences = 1  # of all answers, in the last step
        self._since_plain = self._since_draft = 0
        self._draft_steps = self._plain_steps = self._tries = 0
        self._trying = False
        self._chosen = FEWEST  # drafts of late
        self._pause = 0  # steps until the next one is built
        self._idle = 0  # trees of this answer in a row of which nothing was worth a row
        self._gained = 0.0  # plain steps that drafting has saved

    def max_draft_tokens(self) -> int:
        if self._pause > 0:
            self._pause -= 1
            return 0
        if self._record.plain < FIRST_PLAIN or self._since_plain >= PLAIN_EVERY or self._credit <= 0.0:
            return 0
        self._trying = False
        return min(self._affordable(), 2 * self._chosen + FEWEST)

    def choose(self, probs: Sequence[float]) -> int:
        count = self._break_even_size(probs, self._share.calibration)
        if count == 0 and probs and self._due():
            count = self._break_even_size(probs, 1.0)
            self._trying = count > 0
        count = min(count, self._affordable())
        self._chosen = max(count, self._chosen // 2)
        record = self._record
        record.idle = 0 if count else record.idle + 1
        # A tree that nobody verifies costs time as well; where nothing is known yet, little, and that soon changes.
        self._idle = 0 if count else self._idle + 1
        longest = RETRY * min(1 + min(record.idle // LONGER, self._idle), LONGEST)
        if not probs and record.idle <= MANY:
            longest = SOON
        self._pause = min((1 << min(record.idle, 8)) - 1, longest)
        return count

    @property
    def paused(self) -> bool:
        """Drafts have not paid for a while: there is no hurry to learn for them."""
        return self._record.idle > 2 or self._since_draft > RETRY

    def record(self, drafted: int, promised: float, stood: int, step: StepSize, seconds: float) -> None:
        rows, sequences = step
        if seconds <= 0.0 or rows > MOST_ROWS:
            return
        record = self._record
        self._sequences = sequences or 1
        if drafted == 0:
            record.record_step(step, seconds)
            self._plain_steps += 1
            record.plain += 1
            self._since_plain = 0
            self._since_draft += 1
            self._own.plain(1)
            record.account.plain(self._sequences)
            return
        expected = record.seconds(rows)
        record.record_step(step, seconds)
        self._draft_steps += 1
        self._tries += self._trying
        self._since_plain, self._since_draft = self._since_plain + 1, 0
        self._share.add(promised, stood)
        record.share.add(promised, stood)
        # Against a step of the same answers without drafts. A stall is no fault of the drafts.
        plain = record.seconds(self._sequences)
        longer = min(seconds, 1.5 * max(expected, record.seconds(rows))) / plain - 1.0
        # One answer's drafts hold up all that run beside it: this is the loss of all by these drafts.
        shared = self._sequences * drafted / max(rows - self._sequences, drafted)
        saved = stood - shared * longer
        self._gained += saved
        self._own.drafted(saved)
        record.account.drafted(saved / self._sequences)

    def stats(self) -> dict[str, float]:
        return {
            "plain_steps": float(self._plain_steps),
            "draft_steps": float(self._draft_steps),
            "tries": float(self._tries),
            "kept": self._share.calibration,
            "saved_steps": self._gained,
        }

    @property
    def _credit(self) -> float:
        return min(self._own.credit, self._record.account.credit)

    def _due(self) -> bool:
        return self._since_draft >= RETRY

    def _cost(self, drafts: int) -> float:
        """Seconds of a step in which every answer takes so many drafts: what one may do, all may."""
        return self._record.seconds(self._sequences * (1 + drafts))

    def _break_even_size(self, probs: Sequence[float], share: float) -> int:
        promised = [min(1.0, share * prob) for prob in probs]
        count = best_budget(promised, lambda rows: self._cost(rows - 1))
        if count == 0:
            return 0
        gain = (1.0 + sum(promised[:count])) * self._cost(0) / self._cost(count)
        return count if gain >= MARGIN else 0

    def _affordable(self) -> int:
        """Drafts that the account covers even if none stands."""
        plain = self._cost(0)
        # What a row costs is not known before one was added, and may change with their number.
        count = min(self._rows, 2 * self._record.tried(self._sequences) + 1)
        while count > 0 and self._cost(count) / plain - 1.0 > self._credit:
            count -= 1 + count // 8
        return max(count, 0)
