"""How much a device drafts for a verifier elsewhere, under an energy budget (GELATO).

The outer loop is a Lyapunov queue of energy that chooses the number of drafts with the most utility; the inner loop, an
entropy gate, stops where the draft model is unsure. Both read one set of estimates of acceptance, payload and times,
learnt from each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from paceline.core.clock import ACCEPTANCE_SLOPE, AcceptanceByEntropy, MovingAverage, Ratio

# GELATO's outer loop: how many tokens a step drafts, so that throughput is high and mean energy within the budget.
#
# A virtual queue holds the energy spent beyond the budget (eq. 7); each step takes the number of drafts with the most
# utility, V times throughput less the queue times energy (eq. 8), found by trying all of them. What holds of it
# (for joules a step): the energy of K steps is at most K times the budget plus the queue after them; the queue
# is bounded where the least draft fits the budget; the number of drafts does not grow with the queue.


Unit = Literal["step", "token"]
THROUGHPUT_WEIGHT: Final = 100.0  # V of the paper's figures
DEBT_DRAFTS: Final = 64.0


@dataclass(slots=True)
class EnergyDebt:
    """Joules spent beyond budgets, never below none (Q of eq. 7); of a device, whatever budget each answer has."""

    joules: float = 0.0


@dataclass(frozen=True, slots=True)
class EnergyQueue:
    """A debt, and the budget by which it is paid off: joules a step, as in the paper, or joules a token of the answer.

    With a budget a token, an accepted draft is energy earned: the utility of a step counts that. Raises ValueError for
    a budget that is none.
    """

    budget: float  # J a step or token, in the mean
    per: Unit = "step"
    # V, J per token/s: what throughput is worth in energy. The higher, the longer the budget is exceeded before it
    # holds. None: as `weight_of` says.
    weight: float | None = THROUGHPUT_WEIGHT
    debt: EnergyDebt = field(default_factory=EnergyDebt)  # other queues may share it

    def __post_init__(self) -> None:
        if not 0.0 <= self.budget < math.inf:
            raise ValueError(f"an energy budget of {self.budget} J")

    @property
    def backlog(self) -> float:
        """Joules spent beyond the budget."""
        return self.debt.joules

    @property
    def per_token(self) -> float:
        """Joules that a token pays off."""
        return self.budget if self.per == "token" else 0.0

    def add(self, joules: float, tokens: float = 0.0) -> None:
        """Record what a step has cost. tokens: of the answer, that have come since the last step."""
        self.debt.joules = max(self.debt.joules + joules - self.allowance(tokens), 0.0)

    def charge(self, joules: float) -> None:
        """Record what was spent outside of steps."""
        self.debt.joules += joules

    def allowance(self, tokens: float) -> float:
        """Joules that a step may take."""
        return self.budget * tokens if self.per == "token" else self.budget

    def limited(self, budget: float, per: Unit) -> EnergyQueue:
        """The same debt under a request's budget: the stricter of both; this one where they have different units."""
        if per != self.per or budget >= self.budget:
            return self
        return replace(self, budget=budget)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected tokens, time and energy of a step with some number of drafts."""

    tokens: float  # accepted drafts and one token more
    seconds: float
    joules: float


def weight_of(draft_j: float, round_s: float) -> float:
    """V with which a debt grows to the joules of some `DEBT_DRAFTS` drafts before it holds, whatever a draft costs.

    A draft more gives at most 1 ÷ `round_s` tokens/s, and is left out as soon as V times that is less than the debt
    times its joules.
    """
    return DEBT_DRAFTS * draft_j * draft_j * round_s if draft_j else THROUGHPUT_WEIGHT


def utility(step: Prediction, *, backlog: float, weight: float, earned: float = 0.0) -> float:
    """The worth of a step: weighted throughput less the joules that the debt forbids (eq. 8).

    weight: V, J per token/s; what throughput is worth in energy. earned: J that each token pays off, with a budget a
    token.
    """
    return weight * (step.tokens / step.seconds) - backlog * (step.joules - earned * step.tokens)


def choose_length(
    predict: Callable[[int], Prediction], worth: Callable[[Prediction], float], *, least: int, most: int
) -> int:
    """Number of drafts in least..most of most worth, such as `utility`; of equal ones the smallest."""
    if not 0 <= least <= most:
        raise ValueError(f"drafts from {least} to {most}")
    return max(range(least, most + 1), key=lambda drafts: worth(predict(drafts)))  # the first of equal ones


# GELATO's inner loop: a leaky bucket of entropy, which stops a chain of drafts where the draft model is unsure.
#
# Each draft's entropy flows in, a constant amount leaks out (eq. 12); where the bucket runs over, drafting stops (eq.
# 13). The gate looks at the distribution before a token is drawn from it, so what it decides depends on no drafted
# token of that row, which the exactness of accept-or-reject verification needs, and costs no forward.


LEAST_ACCEPTANCE: Final = 0.9  # ρ0: drafts less likely to be accepted fill the bucket
OVERFLOW: Final = 1.2  # capacity ÷ leak (Θ_th ÷ H_th)


class EntropyGate:
    """The bucket of one chain."""

    def __init__(self, slope: float = ACCEPTANCE_SLOPE) -> None:
        """The leak is the entropy at which acceptance, exp(-slope · H), is the least that is wanted (eq. 11)."""
        self.leak = -math.log(LEAST_ACCEPTANCE) / slope  # nats: H_th
        self.capacity = OVERFLOW * self.leak  # nats: Θ_th
        self._level = 0.0

    def admits(self, nats: float) -> bool:
        """Let the entropy of the next draft's distribution flow in. False: draft no further; call no more."""
        self._level = max(0.0, self._level + nats - self.leak)
        return self._level <= self.capacity


# Estimates for the loops, learnt from each step: acceptance by entropy, accepted length, payload and times.
#
# Knows no clock and no link: the caller says what a step took.


MAX_DRAFTS: Final = 64  # in one step
LEAST_S: Final = 1e-4  # s, of a step: a clock may tell none
_RECENT: Final = 0.99  # factor on older rounds, per new one
_LEAST_STEPS: Final = 16  # before a calibration is of use
_HIGHEST_RATIO: Final = 10.0
_LEAST_HITS: Final = 0.15  # share of rejected drafts whose second guess is the target, below which none are sent
_SECOND_PROBE: Final = 16


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
    # Of drafts that a verdict has reached, not of those behind a rejected one: 1 for an accepted one, else 0.
    accepted: MovingAverage = field(default_factory=lambda: MovingAverage(0.02))
    verified: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))  # s of a step, as `verify_s`
    streamed: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))  # s of a token without any draft
    bits: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))  # sent for a draft
    _reached: list[MovingAverage] = field(default_factory=list)  # by place: 1 where the chain got there, else 0

    @property
    def rho(self) -> float:
        """Share of the examined drafts that were accepted."""
        known = self.accepted.value
        return self.acceptance if known is None else known

    @property
    def verification_s(self) -> float:
        """Seconds of a step beside drafting and sending."""
        known = self.verified.value
        return self.verify_s if known is None else max(known, LEAST_S)

    def streamed_s(self, rtt: float | None) -> float:
        """Seconds of a token where nothing is drafted and the verifier knows. rtt: s; None: not known."""
        known = self.streamed.value
        if known is None and self.verified.value is not None and rtt is not None:
            known = self.verified.value - rtt
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


def _calibration(least: float = 0.0) -> Ratio:
    """Measured figures of steps by predicted ones.

    Predictions know nothing of drafts that no verdict reaches, because they are late or the verifier takes none. A
    budget a token would then be exceeded for ever: drafts that are likely to be accepted seem to earn more than they
    cost.
    """
    return Ratio(memory=_RECENT, least=least, most=_HIGHEST_RATIO, first=_LEAST_STEPS)


@dataclass(slots=True)
class EnergyEstimates:
    """Joules of a draft's forward and of a byte sent, from what a machine was told."""

    cost: Ratio = field(default_factory=lambda: _calibration(0.1))  # of steps, J
    gain: Ratio = field(default_factory=_calibration)  # accepted drafts of steps
    forward: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))
    byte: MovingAverage = field(default_factory=lambda: MovingAverage(0.05))


@dataclass(slots=True)
class OffloadStats:
    """Estimates over the answers of a device, and its energy account."""

    steps: int = 0  # begun
    examined: int = 0  # drafts that a verdict has reached

    estimates: StepEstimates = field(default_factory=StepEstimates)
    acceptance: AcceptanceByEntropy = field(default_factory=AcceptanceByEntropy)
    seconds: SecondGuesses = field(default_factory=SecondGuesses)
    round_s: MovingAverage = field(default_factory=lambda: MovingAverage(1.0 - _RECENT))  # between two verdicts
    energy: EnergyEstimates = field(default_factory=EnergyEstimates)
    queue: EnergyQueue | None = None  # None: no budget
    compute_w: float = 0.0  # power while drafting, where nobody tells the joules of a forward
    send_w: float = 0.0  # while sending, likewise
    joules: float = 0.0  # spent in all


# Operations of drafting on a device (GELATO eq. 1), where its energy is modelled, not measured.


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer that a forward's operations depend on.

    By default the paper's formula: attention without grouped queries, a feed-forward network of two matrices, no
    output head. Not counted: norms, activations, positions, sampling.
    """

    layers: int
    hidden: int
    inner: int
    kv_share: float = 1.0  # heads of keys and values ÷ heads of queries
    matrices: int = 2  # of the feed-forward network; 3 where it is gated
    vocab: int = 0  # rows of the output head; 0: left out

    def flops(self, tokens: int, context: int) -> float:
        """Operations of `tokens` forwards of one row, one after another, behind `context` cached rows."""
        d = self.hidden
        queries_and_output = 4.0 * d * d
        keys_and_values = 4.0 * self.kv_share * d * d
        attention = 4.0 * (context + tokens / 2.0) * d
        feed_forward = 2.0 * self.matrices * d * self.inner
        per_layer = queries_and_output + keys_and_values + attention + feed_forward
        return tokens * (self.layers * per_layer + 2.0 * d * self.vocab)
