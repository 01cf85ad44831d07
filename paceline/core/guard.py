"""Does drafting pay, and how many rows of it: decided from what forwards took and what of them stood.

The decision is the papers' maximum of (1 + U(B)) / T(B) with both halves measured: T is the time from one answer of the
engine to the next, everything between included, over all rows that ran in that step; U is what the drafter promises
times the share of its promises that was kept. Beside it stands an account, so that no model of either can be wrong for
long: drafting may cost an answer one hundredth of its time beyond what it saved. Fed with plain numbers; no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from paceline.core.drafting import best_budget
from paceline.core.profile import ForwardTime

MOST_ROWS: Final = 1024  # in one step, of all answers: more is a prefill
# Times are kept for these row counts: neighbours teach each other, and few are soon known.
CLASSES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
MEMORY: Final = 0.97  # of older promises, per new one
STRENGTH: Final = 2.0  # promised tokens that what was known before weighs
EARNED: Final = 0.01  # of a plain step, by each plain step: what drafting may lose
GRACE: Final = 0.5  # plain steps that the first drafts of an answer may lose
MOST_CREDIT: Final = 8.0  # plain steps: a text that turns unpredictable is given up soon
LEAST_CREDIT: Final = -1.0  # plain steps: and is tried again within a hundred of them
MARGIN: Final = 1.02  # by which drafts must be expected to be faster
UNMEASURED: Final = 4  # drafts while the engine's pace at such a width is not known
PLAIN_EVERY: Final = 100  # drafting steps, to know what a plain one takes now
FIRST_PLAIN: Final = 2  # plain steps before the first drafts on an engine that nothing is known of
RETRY: Final = 16  # plain steps between two attempts while drafts do not pay


def step_class(rows: int) -> int:
    """The row count under which the time of a step is kept: the first in CLASSES that is not smaller."""
    return CLASSES[min(bisect_left(CLASSES, rows), len(CLASSES) - 1)]


@dataclass(slots=True)
class Yield:
    """The share of promised tokens that stood. 1: a drafter's probabilities are right; it starts there."""

    kept: float = 1.0
    _strength: float = STRENGTH
    _promised: float = 0.0
    _stood: float = 0.0
    _before: float = 1.0

    def add(self, promised: float, stood: int) -> None:
        self._promised = MEMORY * self._promised + promised
        self._stood = MEMORY * self._stood + stood
        share = (self._stood + self._strength * self._before) / (self._promised + self._strength)
        self.kept = min(share, 4.0)

    def heir(self) -> Yield:
        """For the next answer: begins where this is."""
        return Yield(self.kept, _before=self.kept)


@dataclass(slots=True)
class Record:
    """What answers of one kind on one engine have taught about drafting: kept beyond them."""

    times: ForwardTime = field(default_factory=lambda: ForwardTime(most=MOST_ROWS))
    share: Yield = field(default_factory=Yield)
    measured: set[int] = field(default_factory=set)  # classes whose time is known
    plain: int = 0  # steps without drafts so far

    def took(self, rows: int, seconds: float) -> None:
        """A step of all answers together. Prefills among them are left out."""
        if 1 <= rows <= MOST_ROWS and seconds > 0.0:
            self.times.add(step_class(rows), seconds)
            self.measured.add(step_class(rows))

    def seconds(self, rows: int) -> float:
        return self.times.at(step_class(rows))


class Budget(Protocol):
    """Says how many drafts a step takes."""

    def most(self) -> int:
        """Drafts worth building a tree for now; 0: a plain step."""

    def choose(self, probs: Sequence[float]) -> int:
        """How many of the drafts that were built, best first, to verify. probs: (n,) that each is output."""

    def stepped(self, drafted: int, promised: float, stood: int, rows: int, sequences: int, seconds: float) -> None:
        """A step is answered: of `drafted` drafts `stood` were output. rows and sequences: of the whole engine step,
        other answers' included. seconds: since the answer before."""

    def stats(self) -> dict[str, float]: ...


class Fixed:
    """Always as many as there are, up to a number: baselines, and what the guard is compared with."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def most(self) -> int:
        return self._rows

    def choose(self, probs: Sequence[float]) -> int:
        return min(len(probs), self._rows)

    def stepped(self, drafted: int, promised: float, stood: int, rows: int, sequences: int, seconds: float) -> None:
        """Nothing is learnt."""

    def stats(self) -> dict[str, float]:
        return {}


class Guard:
    """Of one answer."""

    def __init__(self, record: Record, *, rows: int) -> None:
        """rows: drafts at most in one step."""
        self._record, self._rows = record, rows
        self._share = record.share.heir()
        self.credit = GRACE * min(1.0, self._share.kept)  # plain steps
        self._sequences = 1  # of all answers, in the last step
        self._since_plain = self._since_draft = 0
        self._steps = self._plain_steps = self._tries = 0
        self._trying = False
        self._gained = 0.0  # plain steps that drafting has saved

    def most(self) -> int:
        if self._record.plain < FIRST_PLAIN or self._since_plain >= PLAIN_EVERY or self.credit <= 0.0:
            return 0
        self._trying = False
        if self._share.kept < 0.05 and not self._due():
            return 0
        return self._affordable()

    def choose(self, probs: Sequence[float]) -> int:
        count = self._worthwhile(probs, self._share.kept)
        if count == 0 and probs and self._due():
            count = self._worthwhile(probs, 1.0)
            self._trying = count > 0
        return min(count, self._affordable())

    def stepped(self, drafted: int, promised: float, stood: int, rows: int, sequences: int, seconds: float) -> None:
        if seconds <= 0.0 or rows > MOST_ROWS:
            return
        self._sequences = max(1, sequences)
        expected = self._record.seconds(rows)
        self._record.took(rows, seconds)
        self._steps += 1
        if drafted == 0:
            self._plain_steps += 1
            self._record.plain += 1
            self._since_plain = 0
            self._since_draft += 1
            self.credit = min(self.credit + EARNED, MOST_CREDIT)
            return
        self._tries += self._trying
        self._since_plain, self._since_draft = self._since_plain + 1, 0
        self._share.add(promised, stood)
        self._record.share.add(promised, stood)
        # Against a step of the same answers without drafts. A stall is no fault of the drafts.
        cost = min(seconds, 1.5 * max(expected, self._record.seconds(rows))) / self._record.seconds(self._sequences)
        self._gained += 1.0 + stood - cost
        self.credit = max(min(self.credit + 1.0 + stood - cost, MOST_CREDIT), LEAST_CREDIT)

    def stats(self) -> dict[str, float]:
        return {
            "plain_steps": float(self._plain_steps),
            "draft_steps": float(self._steps - self._plain_steps),
            "tries": float(self._tries),
            "kept": self._share.kept,
            "saved_steps": self._gained,
        }

    def _due(self) -> bool:
        return self._since_draft >= RETRY

    def _cost(self, drafts: int) -> float:
        """Seconds of a step in which every answer takes so many drafts: what one may do, all may."""
        return self._record.seconds(self._sequences * (1 + drafts))

    def _worthwhile(self, probs: Sequence[float], share: float) -> int:
        promised = [min(1.0, share * prob) for prob in probs]
        count = best_budget(promised, lambda rows: self._cost(rows - 1))
        if count == 0:
            return 0
        gain = (1.0 + sum(promised[:count])) * self._cost(0) / self._cost(count)
        return count if gain >= MARGIN else 0

    def _affordable(self) -> int:
        """Drafts that the account covers even if none stands."""
        plain = self._cost(0)
        count = self._rows
        if step_class(self._sequences * (1 + count)) not in self._record.measured:
            known = [rows for rows in self._record.measured if rows > self._sequences]
            count = min(count, max(UNMEASURED, 2 * max(known, default=0) // self._sequences))
        while count > 0 and self._cost(count) / plain - 1.0 > self.credit:
            count -= 1 + count // 8
        return max(count, 0)
