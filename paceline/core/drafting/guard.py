"""Whether drafting pays on one engine, by whole steps of all requests that share it.

A step lasts from one answer of the engine to the next: the forward, the work of all requests on the host, and waiting.
Awake, requests feed their drafters and draft; in a quiet step they do neither, and decode as `autoregressive` does. So
quiet steps are what awake ones are compared with: these cost what they take longer, and save steps of a request by the
tokens they yield beyond one. The difference is an account of time, which drafting may overdraw by a hundredth of the
quiet steps. No clock: the caller supplies times.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from paceline.core.batching.segment import UNKNOWN, StepSize
from paceline.core.estimation.running import MovingAverage, RecentMedian

MAX_ROWS: Final = 1024  # in one step, of all requests; a larger one is a prefill
# Quiet steps are compared with those of about as many rows: the classes are a fifth apart.
ROW_CLASSES: Final[tuple[int, ...]] = (
    *range(1, 9),
    *(10, 12, 14, 16, 19, 22, 26, 32, 38, 45, 54, 64, 76, 90, 108, 128, 152, 181, 215, 256, 304, 362, 431, 512),
    *(609, 724, 861, 1024),
)
KNOWN_WITHIN: Final = 1.35  # ratio of a row count to the nearest one measured, for its time to count as known
RECENT: Final = 5  # steps in a median
# Credits are in quiet steps: the time that drafting may lose.
CREDIT_PER_PLAIN_STEP: Final = 0.01
FIRST_CREDIT: Final = 1.0  # before the first drafts on an engine, and of every later trial
MAX_CREDIT: Final = 16.0  # of what drafting has saved
MIN_REQUEST_CREDIT: Final = -1.0  # of one request, so that it drafts again within a hundred plain steps
MIN_CREDIT: Final = -4.0  # of all, so that drafts are tried again within five hundred quiet steps
NUM_FIRST_QUIET_STEPS: Final = 3  # before the first drafts on an engine
# Awake steps between two quiet ones, which measure anew what a quiet step takes: a machine changes its pace within
# seconds. A quiet step costs what drafts would have saved, so there are fewer where they save much.
QUIET_INTERVAL: Final = 8
MAX_QUIET_INTERVAL: Final = 100  # with a token saved per step
# Rows of prompts whose heads are computed to learn from: one costs a large vocabulary's logits.
MAX_PROMPT_ROWS: Final = 32
PROMPT_ROWS_PER_STEP: Final = 0.25
LOSS_WEIGHT: Final = 1.25  # gains that just make up for longer steps are none to the answer that gains least
MAX_STALL: Final = 1.5  # a step that takes more of the usual time was held up by something else


@dataclass(slots=True)
class TimeCredit:
    """Time that drafting may lose, in plain steps: grows by what drafting saves, and a little by each plain step."""

    credit: float
    least: float = MIN_REQUEST_CREDIT

    def plain(self) -> None:
        """Record a plain step."""
        self.credit = min(self.credit + CREDIT_PER_PLAIN_STEP, MAX_CREDIT)

    def drafted(self, saved: float) -> None:
        """Record a drafting step. saved: plain steps; negative for a loss."""
        self.credit = min(max(self.credit + saved, self.least), MAX_CREDIT)


@dataclass(slots=True)
class _Reports:
    """What requests have reported of one step."""

    step: StepSize
    seconds: float = 0.0  # sum of the requests' own measurements
    requests: int = 0
    awake: int = 0  # requests that were
    drafted: int = 0
    relative_time: float = 0.0  # sum of each request's steps for a token, relative to plain decoding


class StepMedians:
    """Recent times of steps by their rows."""

    def __init__(self) -> None:
        self._medians: dict[int, RecentMedian] = {}  # by class

    def add(self, rows: int, seconds: float) -> float:
        """The median of the class, with this step."""
        median = self._medians.setdefault(_row_class(rows), RecentMedian(RECENT))
        median.add(seconds)
        return median.value or seconds

    def near(self, rows: int) -> float | None:
        """Median of the class that is nearest to so many rows; None if none is near."""
        nearest = min(self._medians, key=lambda each: max(rows / each, each / rows), default=None)
        if nearest is None or max(rows / nearest, nearest / rows) > KNOWN_WITHIN:
            return None
        return self._medians[nearest].value


@dataclass(slots=True)
class StepGuard:
    """Shared by all requests of one kind on one engine. Each reports every step that it had rows in."""

    awake: bool = False  # in the step that is being prepared; else it is quiet
    resting: bool = False  # drafting does not pay: quiet until the next trial
    credit: TimeCredit = field(default_factory=lambda: TimeCredit(FIRST_CREDIT, MIN_CREDIT))
    trials: int = 0  # after a rest
    _quiet: StepMedians = field(default_factory=StepMedians)  # by rows without drafts
    _awake: StepMedians = field(default_factory=StepMedians)  # by rows
    _prompt_rows: float = MAX_PROMPT_ROWS
    _num_quiet: int = 0
    _since_quiet: int = 0
    _loss: MovingAverage = field(default_factory=MovingAverage)  # of awake steps, without what was accepted
    _gain: MovingAverage = field(default_factory=MovingAverage)  # accepted, for each sequence
    _reports: _Reports = field(default_factory=lambda: _Reports(UNKNOWN))

    def report(self, step: StepSize, seconds: float, *, drafted: int, accepted: float, awake: bool) -> None:
        """Record a request's part in a step. step: one object for all requests. seconds: since the request's previous
        answer. accepted: drafts for each awake step of the request, lately. awake: of that request in that step."""
        if step is not self._reports.step:
            self._settle()
            self._reports = _Reports(step)
            self._decide(step.sequences)
        reports = self._reports
        reports.seconds += seconds
        reports.requests += 1
        reports.awake += awake
        reports.drafted += drafted
        reports.relative_time += 1.0 / (1.0 + accepted)

    def take_prompt_rows(self, most: int) -> int:
        """Rows that a prompt may be learnt from: of many prompts at once those of the first."""
        taken = 0 if self.resting else min(most, int(self._prompt_rows))
        self._prompt_rows -= taken
        return taken

    @property
    def last_step(self) -> StepSize:
        return self._reports.step

    def _settle(self) -> None:
        """All requests have reported: take the step into account."""
        reports = self._reports
        rows = reports.step.rows - reports.drafted  # that the step would have had without drafts
        if not reports.requests or not 1 <= rows <= MAX_ROWS or reports.seconds <= 0.0:
            return
        self._prompt_rows = min(self._prompt_rows + PROMPT_ROWS_PER_STEP, MAX_PROMPT_ROWS)
        seconds = reports.seconds / reports.requests
        if not reports.awake:
            self._quiet.add(rows, seconds)
            self._num_quiet += 1
            self._since_quiet = 0
            self.credit.plain()
            return
        self._since_quiet += 1
        usual = self._awake.add(reports.step.rows, seconds)
        quiet = self._quiet.near(rows)
        if quiet is not None:
            self._loss.add(min(seconds, MAX_STALL * max(usual, quiet)) / quiet - 1.0)
        # A mean, since single steps vary; and no saving, since nothing but accepted drafts saves time.
        loss = max(self._loss.value or 0.0, 0.0)
        # The mean of the requests' times and not of their tokens: all wait for longer steps, whoever gains by them.
        others = max(reports.step.sequences - reports.requests, 0)
        gain = (reports.requests + others) / (reports.relative_time + others) - 1.0
        self._gain.add(gain)
        self.credit.drafted(gain - LOSS_WEIGHT * loss)

    def _decide(self, sequences: int) -> None:
        """Whether the next step is awake."""
        credit = self.credit.credit
        if self.resting and credit >= FIRST_CREDIT:
            self.resting = False
            self.trials += 1
            self._loss, self._gain = MovingAverage(), MovingAverage()
        elif not self.resting and credit <= 0.0:
            self.resting = True
        is_measured = self._num_quiet >= NUM_FIRST_QUIET_STEPS and self._quiet.near(max(sequences, 1)) is not None
        saved = min(self._gain.value or 0.0, 1.0)
        interval = QUIET_INTERVAL + (MAX_QUIET_INTERVAL - QUIET_INTERVAL) * saved
        self.awake = not self.resting and is_measured and self._since_quiet < interval


def _row_class(rows: int) -> int:
    """The first class that is not smaller."""
    return ROW_CLASSES[min(bisect_left(ROW_CLASSES, rows), len(ROW_CLASSES) - 1)]
