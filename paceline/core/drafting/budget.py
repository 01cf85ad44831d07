"""The number of draft tokens per step, chosen from measured step times and acceptance.

Maximises (1 + U(B)) / T(B) as in the papers, with both terms measured: T is the time from one result of the engine to
the next, everything between included, over all rows of that step; U is the expected number of accepted tokens by the
drafter's probabilities times a calibration factor. The guard limits the loss while either model is wrong: it decides in
which steps requests draft at all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from paceline.core.batching.segment import UNKNOWN, StepSize
from paceline.core.clock import AcceptanceByRank, MovingAverage, Ratio, StepClock, row_class
from paceline.core.drafting.ngram_drafter import BESIDE_FIRSTS, MODEL_FIRSTS, MODEL_MEMORY, DrafterStats, best_budget
from paceline.core.offloading import OffloadStats

# Whether drafting pays on one engine, by whole steps of all requests that share it.
#
# A step lasts from one answer of the engine to the next: the forward, the work of all requests on the host, and
# waiting. Awake, requests feed their drafters and draft; in a quiet step they do neither, and decode as
# `autoregressive` does. So quiet steps are what awake ones are compared with: these cost what they take longer, and
# save steps of a request by the tokens they yield beyond one. The difference is an account of time, which drafting may
# overdraw by a hundredth of the quiet steps.


MAX_ROWS: Final = 1024  # in one step, of all requests; a larger one is a prefill
MAX_DRAFT_ROWS: Final = 64  # likewise, of one answer that two sides write
RECENT: Final = 5  # awake steps of a size, of which the median counts
RECENT_QUIET: Final = 9  # quiet steps of a size, of which the mean counts
# Credits are in quiet steps: the time that drafting may lose.
CREDIT_PER_PLAIN_STEP: Final = 0.01
FIRST_CREDIT: Final = 1.0  # before the first drafts on an engine, and of every later trial
MAX_CREDIT: Final = 16.0  # of what drafting has saved
MIN_REQUEST_CREDIT: Final = -1.0  # of one request, so that it drafts again within a hundred plain steps
MIN_CREDIT: Final = -4.0  # of all, so that drafts are tried again within five hundred quiet steps
NUM_FIRST_QUIET_STEPS: Final = 8  # before the first drafts on an engine
# Awake steps between two quiet ones, which measure anew what a quiet step takes: a machine changes its pace within
# seconds. A quiet step costs what drafts would have saved, so there are fewer where they save much.
QUIET_INTERVAL: Final = 8
MAX_QUIET_INTERVAL: Final = 100  # with a token saved per step
# Rows of prompts whose heads are computed to learn from: one costs a large vocabulary's logits.
MAX_PROMPT_ROWS: Final = 32
PROMPT_ROWS_PER_STEP: Final = 0.25
LOSS_WEIGHT: Final = 1.25  # gains that just make up for longer steps are none to the answer that gains least
MAX_STALL: Final = 1.5  # a step that takes more of the usual time was held up by something else
LOSS_MEMORY: Final = 0.05  # weight of an awake step in the mean of their losses
LEAST_SPREAD: Final = 0.1  # of the times of steps alike, relative to their mean: a few may be alike by chance


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
class Losses:
    """Times of awake steps over those of quiet ones, minus 1: their moving average, and how far it can be believed."""

    steps: int = 0
    _mean: MovingAverage = field(default_factory=lambda: MovingAverage(LOSS_MEMORY))
    _square: MovingAverage = field(default_factory=lambda: MovingAverage(LOSS_MEMORY))

    def add(self, loss: float) -> None:
        """Record a step."""
        self.steps += 1
        self._mean.add(loss)
        self._square.add(loss * loss)

    @property
    def mean(self) -> float:
        """At least 0, since nothing but accepted drafts saves time."""
        return max(self._mean.value or 0.0, 0.0)

    @property
    def certain(self) -> float:
        """The mean less its standard error: on a busy machine steps that cost nothing look like a loss at first."""
        if not self.steps:
            return 0.0
        spread = math.sqrt(max((self._square.value or 0.0) - (self._mean.value or 0.0) ** 2, 0.0))
        return max(self.mean - max(spread, LEAST_SPREAD) / math.sqrt(self.steps), 0.0)


@dataclass(slots=True)
class _Reports:
    """Reports of requests on one step."""

    step: StepSize
    seconds: float = 0.0  # sum of the requests' own measurements
    requests: int = 0
    awake: int = 0  # requests that were
    drafted: int = 0
    relative_time: float = 0.0  # sum of each request's steps for a token, relative to plain decoding


@dataclass(slots=True)
class StepGuard:
    """Shared by all requests of one kind on one engine. Each reports every step that it had rows in."""

    awake: bool = False  # in the step that is being prepared; else it is quiet
    resting: bool = False  # drafting does not pay: quiet until the next trial
    credit: TimeCredit = field(default_factory=lambda: TimeCredit(FIRST_CREDIT, MIN_CREDIT))
    trials: int = 0  # after a rest
    _quiet: StepClock = field(default_factory=lambda: StepClock(keeps=RECENT_QUIET))  # by rows without drafts
    _awake: StepClock = field(default_factory=lambda: StepClock(keeps=RECENT))
    _prompt_rows: float = MAX_PROMPT_ROWS
    _num_quiet: int = 0
    _since_quiet: int = 0
    _loss: Losses = field(default_factory=Losses)  # of awake steps, without what was accepted
    _owed: float = 0.0  # losses that were not certain, which a rest pays
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
        # Means on both sides: what holds up steps holds up a quiet one as often, which a median would not count.
        quiet = self._quiet.mean_near(rows, MAX_STALL)
        if quiet is not None:
            self._loss.add(min(seconds, MAX_STALL * max(usual, quiet)) / quiet - 1.0)
        # The mean of the requests' times and not of their tokens: all wait for longer steps, whoever gains by them.
        others = max(reports.step.sequences - reports.requests, 0)
        gain = (reports.requests + others) / (reports.relative_time + others) - 1.0
        self._gain.add(gain)
        certain = self._loss.certain
        self.credit.drafted(gain - LOSS_WEIGHT * certain)
        saves = self.credit.credit >= MAX_CREDIT  # more than may be owed
        self._owed = 0.0 if saves else self._owed + LOSS_WEIGHT * (self._loss.mean - certain)

    def _decide(self, sequences: int) -> None:
        """Decide whether requests draft in the next step."""
        credit = self.credit.credit
        if self.resting and credit >= FIRST_CREDIT:
            self.resting = False
            self.trials += 1
            self._loss, self._gain = Losses(), MovingAverage()
        elif not self.resting and credit <= 0.0:
            self.resting = True
            self.credit.drafted(-self._owed)
            self._owed = 0.0
        is_measured = self._num_quiet >= NUM_FIRST_QUIET_STEPS and self._quiet.near(max(sequences, 1)) is not None
        saved = min(self._gain.value or 0.0, 1.0)
        interval = QUIET_INTERVAL + (MAX_QUIET_INTERVAL - QUIET_INTERVAL) * saved
        self.awake = not self.resting and is_measured and self._since_quiet < interval


CALIBRATION_MEMORY: Final = 0.97  # factor on older drafts, per new step
CALIBRATION_STRENGTH: Final = 2.0  # weight of the prior, in expected tokens
REQUEST_CREDIT: Final = 3.0  # of the guard's credit for one request, before it has saved any time itself
MIN_SPEED_UP: Final = 1.02  # expected of a draft
TRIAL_NODES: Final = 6  # of a tree that is built to see whether it pays
EMPTY_TREE_PAUSE: Final = 2  # plain steps after a tree without nodes
MAX_EMPTY_TREES: Final = 8  # such trees in a row before the pause grows: building them costs time too
RETRY_INTERVAL: Final = 16  # plain steps between two attempts then, and while drafts do not pay
# Unused trees of all requests that lengthen the pause by one RETRY_INTERVAL: a tree takes a hundredth of a step.
IDLE_TREES_PER_RETRY: Final = 32
MAX_PAUSE_RETRIES: Final = 4  # RETRY_INTERVALs of a pause; also at most this request's own unused trees, plus 1


def calibration(prior: float = 1.0) -> Ratio:
    """Accepted tokens of expected ones, of one request. By default the drafter's probabilities are right."""
    return Ratio(prior, CALIBRATION_STRENGTH, CALIBRATION_MEMORY, most=4.0)


@dataclass(slots=True)
class BudgetStats:
    """Statistics about drafting on one engine, shared by requests of one kind and kept beyond them."""

    guard: StepGuard = field(default_factory=StepGuard)
    calibration: Ratio = field(default_factory=calibration)
    idle: int = 0  # trees in a row, of any request, that were not worth verifying
    _times: dict[int, StepClock] = field(default_factory=dict)  # by class of sequences, as each costs the host time
    _last_step: StepSize = UNKNOWN

    def record_step(self, step: StepSize, seconds: float) -> None:
        """Record a step of all requests. Each of them may report the same object, which counts once. Prefills are
        ignored."""
        if step is not self._last_step:
            self._last_step = step
            self.times(step.sequences).add(step.rows, seconds)

    def times(self, sequences: int) -> StepClock:
        """Times of steps of about so many sequences."""
        return self._times.setdefault(row_class(sequences), StepClock())


class OtherDrafts(NamedTuple):
    """Drafts of another source, which a request's step verifies in any case, beside those of a budget."""

    rows: int = 0
    tokens: float = 0.0  # accepted ones, as expected


class AdaptiveBudget:
    """The number of draft tokens per step of one request, from measured step times and acceptance.

    `beside` is of the step that is being prepared, or under way: set before `max_draft_tokens`.
    """

    def __init__(self, stats: BudgetStats, *, rows: int) -> None:
        """rows: most draft tokens in one step."""
        self.beside = OtherDrafts()
        self._stats, self._rows = stats, rows
        self._calibration = calibration(stats.calibration.value)
        self._request_credit = TimeCredit(REQUEST_CREDIT)
        self._sequences = 1  # of all requests, in the last step
        self.awake = stats.guard.awake  # False: the step that is being prepared is a plain one, without work for drafts
        self._times = stats.times(1)  # of steps of so many sequences
        self._since_draft = 0
        self._accepted = MovingAverage()  # drafts of an awake step
        self._draft_steps = self._plain_steps = self._tries = 0
        self._trying = False
        self._chosen = TRIAL_NODES  # recent number of draft tokens
        self._pause = 0  # plain steps before the next tree is built
        self._idle = 0  # trees of this request in a row that were not worth verifying
        self._saved = 0.0  # plain steps that drafting has saved

    def take_prompt_rows(self, most: int) -> int:
        """Rows at a prompt's end that the tables may learn from."""
        return self._stats.guard.take_prompt_rows(most)

    def max_draft_tokens(self) -> int:
        """Most nodes of the next draft tree; 0: a plain step."""
        if not self.awake:
            return 0
        if self._pause > 0:
            self._pause -= 1
            return 0
        if self._credit <= 0.0:
            return 0
        self._trying = False
        return min(self._affordable(), 2 * self._chosen + TRIAL_NODES)

    def choose(self, probs: Sequence[float]) -> int:
        """The number of draft tokens to verify, best first. probs: (n,) probability that each is accepted."""
        count = self._break_even_size(probs, self._calibration.value)
        if count == 0 and probs and self._since_draft >= RETRY_INTERVAL:
            count = self._break_even_size(probs, 1.0)
            self._trying = count > 0
        count = min(count, self._affordable())
        self._chosen = max(count, self._chosen // 2)
        stats = self._stats
        stats.idle = 0 if count else stats.idle + 1
        # A tree that is not verified costs time as well; less while the tables are empty, and that soon changes.
        self._idle = 0 if count else self._idle + 1
        max_pause = RETRY_INTERVAL * min(1 + min(stats.idle // IDLE_TREES_PER_RETRY, self._idle), MAX_PAUSE_RETRIES)
        if not probs and stats.idle <= MAX_EMPTY_TREES:
            max_pause = EMPTY_TREE_PAUSE
        self._pause = min((1 << min(stats.idle, 8)) - 1, max_pause)
        return count

    def worth(self, probs: Sequence[float]) -> int:
        """The number of another source's drafts that pay, best first, if nothing else is drafted. probs: as of
        `choose`."""
        self.beside = OtherDrafts()
        return self._break_even_size(probs, 1.0)

    @property
    def resting(self) -> bool:
        """True if drafts do not pay: the drafter need not be fed either."""
        return self._stats.guard.resting

    @property
    def paused(self) -> bool:
        """True if drafts have not paid for a while, so that the drafter need not be updated at once."""
        return self._stats.idle > 2 or self._since_draft > RETRY_INTERVAL

    def record(
        self,
        drafted: int,
        expected: float,
        accepted: int,
        step: StepSize,
        seconds: float,
        *,
        waited: float = 0.0,
        others: int = 0,
    ) -> None:
        """Record a step with `drafted` draft tokens. step: of the engine, with the rows of all requests, which report
        one shared object. seconds: since the previous result, without those `waited` for drafts. others: accepted ones
        of those beside."""
        rows, sequences = step
        if seconds <= 0.0:
            return
        stats = self._stats
        if self.awake:
            self._accepted.add(accepted / (1.0 + others))
        recent = self._accepted.value or 0.0
        stats.guard.report(step, seconds + waited, drafted=drafted, accepted=recent, awake=self.awake)
        self.awake = stats.guard.awake
        if drafted == 0:
            self._plain_steps += 1
            self._since_draft += 1
            self._request_credit.plain()
        if rows > MAX_ROWS or (stats.guard.resting and drafted == 0):
            return
        self._sequences = sequences or 1
        self._times = stats.times(self._sequences)
        estimate = self._times.at(rows) if drafted else 0.0
        stats.record_step(step, seconds)
        if drafted == 0:
            return
        self._draft_steps += 1
        self._tries += self._trying
        self._since_draft = 0
        self._calibration.add(expected, accepted)
        stats.calibration.add(expected, accepted)
        # Compared with a step of the same requests without drafts. A stall, which is not caused by drafts, is capped.
        seconds = min(seconds, 1.5 * max(estimate, self._times.at(rows))) + waited
        extra = seconds / self._cost(0) - 1.0
        # One request's drafts delay all others of the step: the loss of all requests by this request's drafts.
        shared = self._sequences * drafted / max(rows - self._sequences, drafted)
        saved = accepted / (1.0 + others) - shared * extra
        self._saved += saved
        self._request_credit.drafted(saved)

    def stats(self) -> dict[str, float]:
        return {
            "plain_steps": float(self._plain_steps),
            "draft_steps": float(self._draft_steps),
            "tries": float(self._tries),
            "kept": self._calibration.value,
            "saved_steps": self._saved,
        }

    @property
    def _credit(self) -> float:
        return min(self._request_credit.credit, self._stats.guard.credit.credit)

    def _cost(self, drafts: int) -> float:
        """Seconds of a step in which every request drafts this many tokens, as each of them might."""
        return self._times.at(self._sequences * (1 + self.beside.rows + drafts))

    def _break_even_size(self, probs: Sequence[float], calibration: float) -> int:
        calibrated = [min(1.0, calibration * prob) for prob in probs]
        tokens = 1.0 + self.beside.tokens
        count = best_budget(calibrated, lambda rows: self._cost(rows - 1), tokens)
        if count == 0:
            return 0
        speed_up = (1.0 + sum(calibrated[:count]) / tokens) * self._cost(0) / self._cost(count)
        return count if speed_up >= MIN_SPEED_UP else 0

    def _affordable(self) -> int:
        """Draft tokens that the credit covers even if none is accepted."""
        plain = self._cost(0)
        # The cost of a row is unknown before it is measured, and may change with their number: at most double them.
        measured = self._times.most_rows // self._sequences - 1 - self.beside.rows
        count = min(self._rows, 2 * max(0, measured) + 1)
        while count > 0 and self._cost(count) / plain - 1.0 > self._credit:
            count -= 1 + count // 8
        return max(count, 0)


FIRST_DRAFT_S: Final = 0.01  # s of a draft model's forward, before one has been timed
DRAFT_TIMES: Final = 4  # of its forwards that are remembered
DRAFT_RETRY: Final = 256  # forwards that were not worth it, before one is timed anew


@dataclass(slots=True)
class DraftModelStats:
    """Measurements of a draft model: which of its drafts are accepted, and s of its forwards, while the target has
    nothing to compute and beside it. On one machine these take longer, or wait for the target."""

    ranks: AcceptanceByRank = field(  # by `model_margin_class`
        default_factory=lambda: AcceptanceByRank(MODEL_FIRSTS, MODEL_MEMORY)
    )
    declined: int = 0  # forwards that were not asked for since the last one
    trials: int = 0  # beginnings and ends of forwards that were asked for to see what one takes, see `is_due`
    _alone: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFT_TIMES))
    _beside: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFT_TIMES))

    def add(self, seconds: float, *, beside: bool) -> None:
        self.trials += self.is_due
        self.declined = 0
        (self._beside if beside else self._alone).append(seconds)

    @property
    def is_due(self) -> bool:
        """One is to be timed, whatever it takes."""
        return not self._alone or self.declined >= DRAFT_RETRY

    def seconds(self, *, beside: bool) -> float:
        """Seconds of the next forward: the shortest of late, since what holds up a single one is not its price."""
        alone = min(self._alone, default=FIRST_DRAFT_S)
        return min(self._beside, default=3.0 * alone) if beside else alone


# Statistics of a side that the next request reuses: acceptance rates of drafts and times of its engine.
#
# They affect which rows are computed and which side aggregates, never a token. Shared by all requests of a kind on one
# engine; machines update them as they run.


@dataclass(slots=True)
class OnlineStats:
    """Statistics of requests with alike sampling: acceptance rates at temperature 1 differ from those at 0."""

    timing: StepClock = field(default_factory=lambda: StepClock(max_rows=MAX_DRAFT_ROWS))
    own_ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    peer_ranks: AcceptanceByRank = field(default_factory=AcceptanceByRank)
    beside_choice: AcceptanceByRank = field(default_factory=lambda: AcceptanceByRank(BESIDE_FIRSTS))  # by its class
    budget: BudgetStats = field(default_factory=BudgetStats)
    drafter: DrafterStats = field(default_factory=DrafterStats)
    draft_model: DraftModelStats = field(default_factory=DraftModelStats)
    offload: OffloadStats = field(default_factory=OffloadStats)

    def begin(self, timed: Iterable[tuple[int, float]]) -> None:
        """Add measurements from before the first request: (rows, seconds) of forwards."""
        for rows, seconds in timed:
            self.timing.add(rows, seconds)
            self.budget.record_step(StepSize(rows, 1), seconds)
