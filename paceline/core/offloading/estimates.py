"""Estimates for the loops, learnt from each step: acceptance by entropy, accepted length, payload and times.

Knows no clock and no link: the caller says what a step took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.estimation.running import MovingAverage
from paceline.core.offloading.draft_length import EnergyQueue, Prediction
from paceline.core.offloading.entropy_gate import ACCEPTANCE_SLOPE

MAX_DRAFTS: Final = 64  # in one step
LEAST_S: Final = 1e-4  # s, of a step: a clock may tell none
PACE_LIFE_S: Final = 600.0
_MEMORY: Final = 0.995  # factor on older observations of acceptance by entropy, per new one
_PRIOR: Final = 20.0  # weight of the first slope, as Fisher information
_RECENT: Final = 0.99  # factor on older rounds, per new one
_LEAST_STEPS: Final = 16  # before a calibration is of use
_HIGHEST_RATIO: Final = 10.0
_SLOPES: Final = 0.02, 20.0  # least and highest, 1/nat
_LEAST_HITS: Final = 0.15  # share of rejected drafts whose second guess is the target, below which none are sent
_SECOND_PROBE: Final = 16


@dataclass(slots=True)
class AcceptanceByEntropy:
    """Acceptance of a draft, exp(-slope · H), fitted online by maximum likelihood (Fisher scoring with fading)."""

    slope: float = ACCEPTANCE_SLOPE  # 1/nat
    _information: float = _PRIOR

    def add(self, nats: float, *, accepted: bool) -> None:
        """Record a draft that was examined. nats: entropy of the distribution it was drawn from."""
        if nats < 1e-6:
            return  # acceptance does not depend on the slope there
        exponent = self.slope * nats
        rejected = -math.expm1(-exponent)
        information = nats * nats * (1.0 - rejected) / rejected
        score = -nats if accepted else nats * (1.0 - rejected) / rejected
        self._information = _MEMORY * self._information + information
        low, high = _SLOPES
        self.slope = min(max(self.slope + score / self._information, low), high)

    def at(self, nats: float) -> float:
        """Probability that a draft is accepted."""
        return math.exp(-self.slope * nats)


@dataclass(slots=True)
class SecondGuesses:
    """How often the target is a rejected draft's second guess, and so whether second guesses pay for their rows."""

    _hits: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))
    _places: int = 0

    def add(self, *, hit: bool) -> None:
        """Record a rejected draft that had a second guess."""
        self._hits.add(float(hit))

    def pays(self) -> bool:
        """The next place is to have one. Now and then even where they do not pay: else that could never change."""
        self._places += 1
        known = self._hits.value
        return known is None or known >= _LEAST_HITS or self._places % _SECOND_PROBE == 0


@dataclass(slots=True)
class StepEstimates:
    """Means of what steps have cost and given, and the prediction of the next one.

    The expected tokens of a chain that is never cut short are eq. 6: 1 + ρ + ρ² + ….
    Chains often end before their intended length, where the gate or the end of the text stops them: the share that
    gets so far is learnt by place, and tokens, seconds and joules are expected values over it.
    """

    acceptance: float = 0.9  # ρ before anything is known
    verify_s: float = 0.1  # s, of a step beside drafting and sending, before anything is known
    _accepted: MovingAverage = field(default_factory=lambda: MovingAverage(0.02))
    _verify: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    _streamed: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))
    _bits: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))
    _reached: list[MovingAverage] = field(default_factory=list)  # by place: 1 where the chain got there, else 0

    @property
    def rho(self) -> float:
        """Share of the examined drafts that were accepted."""
        known = self._accepted.value
        return self.acceptance if known is None else known

    @property
    def verification_s(self) -> float:
        """Seconds of a step beside drafting and sending."""
        known = self._verify.value
        return self.verify_s if known is None else max(known, LEAST_S)

    def streamed_s(self, rtt: float | None) -> float:
        """Seconds of a token where nothing is drafted and the verifier knows. rtt: s; None: not known."""
        known = self._streamed.value
        if known is None and self._verify.value is not None and rtt is not None:
            known = self._verify.value - rtt
        return self.verification_s if known is None else max(known, LEAST_S)

    def reach(self, place: int) -> float:
        """Share of the chains meant to have a draft at this place, from 0, that got there."""
        if place >= len(self._reached):
            place = len(self._reached) - 1
        known = self._reached[place].value if place >= 0 else None
        return 1.0 if known is None else known

    def add_chain(self, intended: int, drafted: int) -> None:
        """Record how far a chain got."""
        while len(self._reached) < min(intended, MAX_DRAFTS):
            self._reached.append(MovingAverage(0.05))
        for place in range(min(intended, MAX_DRAFTS)):
            self._reached[place].add(1.0 if place < drafted else 0.0)

    def add_examined(self, *, accepted: bool) -> None:
        """Record a draft that a verdict has reached. Those behind a rejected one are not examined."""
        self._accepted.add(float(accepted))

    def add_verification(self, seconds: float) -> None:
        """Record a step's seconds beside drafting and sending."""
        self._verify.add(seconds)

    def add_streamed(self, seconds: float) -> None:
        """Record the seconds of a token for which nothing was drafted."""
        self._streamed.add(seconds)

    def add_payload(self, bits: Sequence[float]) -> None:
        """Record the bits sent for each draft."""
        for each in bits:
            self._bits.add(each)

    def bits_per_draft(self, first: float) -> float:
        """Mean bits sent for a draft; `first` before anything is known."""
        known = self._bits.value
        return first if known is None else known

    def predict(self, drafts: int, *, draft_s: float, draft_j: float, send_s: float, send_j: float) -> Prediction:
        """The step with so many intended drafts.

        draft_s, draft_j: seconds and joules of computing one draft. send_s, send_j: of sending one.
        """
        tokens, expected = 1.0, 0.0
        likely = 1.0
        for place in range(drafts):
            reached = self.reach(place)
            likely *= self.rho
            tokens += reached * likely
            expected += reached
        seconds = expected * (draft_s + send_s) + self.verification_s
        return Prediction(tokens, seconds, expected * (draft_j + send_j))


@dataclass(slots=True)
class AnswerPace:
    """Seconds a token of whole answers, for as long as that tells of the present: links and machines change."""

    seconds: MovingAverage = field(default_factory=lambda: MovingAverage(0.3))
    at: float = -math.inf  # s, when an answer ended last

    def add(self, seconds: float, now: float) -> None:
        if now > self.at + PACE_LIFE_S:
            self.seconds = MovingAverage(self.seconds.weight)
        self.seconds.add(seconds)
        self.at = now

    def recent(self, now: float) -> float | None:
        """None where no answer has ended for so long."""
        return self.seconds.value if now <= self.at + PACE_LIFE_S else None


@dataclass(slots=True)
class Calibration:
    """Ratio of measured to predicted figures of steps, recent ones counted more; 1 before some are known.

    Predictions know nothing of drafts that no verdict reaches, because they are late or the verifier takes none. A
    budget a token would then be exceeded for ever: drafts that are likely to be accepted seem to earn more than they
    cost.
    """

    least: float = 0.0
    _predicted: float = 0.0
    _real: float = 0.0
    _steps: int = 0

    def add(self, predicted: float, real: float) -> None:
        self._predicted = _RECENT * self._predicted + predicted
        self._real = _RECENT * self._real + real
        self._steps += 1

    @property
    def ratio(self) -> float:
        if self._steps < _LEAST_STEPS or not self._predicted:
            return 1.0
        return min(max(self._real / self._predicted, self.least), _HIGHEST_RATIO)


@dataclass(slots=True)
class EnergyEstimates:
    """Joules of a draft's forward and of a byte sent, from what a machine was told; None before it was."""

    cost: Calibration = field(default_factory=lambda: Calibration(0.1))  # of steps, J
    gain: Calibration = field(default_factory=Calibration)  # accepted drafts of steps
    _forward: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))
    _byte: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))

    @property
    def forward_j(self) -> float | None:
        return self._forward.value

    @property
    def byte_j(self) -> float | None:
        return self._byte.value

    def add_forward(self, joules: float) -> None:
        self._forward.add(joules)

    def add_sent(self, num_bytes: int, joules: float) -> None:
        if num_bytes:
            self._byte.add(joules / num_bytes)


@dataclass(slots=True)
class Throughput:
    """Tokens a second of answers as they were written, the later the more (θ of the renewal objective)."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0  # verdicts

    def add(self, tokens: int, seconds: float) -> None:
        """Record a verdict: its tokens, and the seconds since the one before."""
        self.tokens = _RECENT * self.tokens + tokens
        self.seconds = _RECENT * self.seconds + seconds
        self.rounds = _RECENT * self.rounds + 1.0

    @property
    def rate(self) -> float:
        """Tokens/s; 0 before anything is known."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def round_s(self) -> float:
        """Seconds of a round; 1 before anything is known."""
        return self.seconds / self.rounds if self.seconds else 1.0


@dataclass(slots=True)
class OffloadStats:
    """Estimates over the answers of a device, and its energy account."""

    steps: int = 0  # begun
    examined: int = 0  # drafts that a verdict has reached

    estimates: StepEstimates = field(default_factory=StepEstimates)
    acceptance: AcceptanceByEntropy = field(default_factory=AcceptanceByEntropy)
    seconds: SecondGuesses = field(default_factory=SecondGuesses)
    pace: AnswerPace = field(default_factory=AnswerPace)
    throughput: Throughput = field(default_factory=Throughput)
    energy: EnergyEstimates = field(default_factory=EnergyEstimates)
    queue: EnergyQueue | None = None  # None: no budget
    compute_w: float = 0.0  # power while drafting, where nobody tells the joules of a forward
    send_w: float = 0.0  # while sending, likewise
    joules: float = 0.0  # spent in all
