"""GELATO's outer loop: how many tokens a step drafts, so that throughput is high and mean energy within the budget.

A virtual queue holds the energy spent beyond the budget (eq. 7); each step takes the number of drafts with the most
utility, V times throughput less the queue times energy (eq. 8), found by trying all of them. What holds of it
(for joules a step): the energy of K steps is at most K times the budget plus the queue after them; the queue
is bounded where the least draft fits the budget; the number of drafts does not grow with the queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

Objective = Literal["per_step", "renewal"]
Unit = Literal["step", "token"]
THROUGHPUT_WEIGHT: Final = 100.0  # V of the paper's figures
DEBT_DRAFTS: Final = 64.0


@dataclass(slots=True)
class EnergyDebt:
    """Joules spent beyond budgets, never below none (Q of eq. 7); of a device, whatever budget each answer has."""

    joules: float = 0.0


class EnergyQueue:
    """A debt, and the budget by which it is paid off: joules a step, as in the paper, or joules a token of the answer.

    With a budget a token, an accepted draft is energy earned: the utility of a step counts that.
    """

    def __init__(
        self,
        budget: float,
        backlog: float = 0.0,
        *,
        per: Unit = "step",
        weight: float | None = THROUGHPUT_WEIGHT,
        debt: EnergyDebt | None = None,
    ) -> None:
        """budget: J a step or token, in the mean. weight: V, J per token/s; what throughput is worth in energy: the
        higher, the longer the budget is exceeded before it holds; None: as `weight_of` says. debt: shared with other
        queues; None: its own."""
        if not (0.0 <= budget < math.inf and 0.0 <= backlog < math.inf):
            raise ValueError(f"an energy budget of {budget} J with {backlog} J spent beyond it")
        self.budget, self.per, self.weight = budget, per, weight
        self.debt = EnergyDebt(backlog) if debt is None else debt

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
        return EnergyQueue(budget, per=per, weight=self.weight, debt=self.debt)


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


def utility(
    step: Prediction,
    *,
    backlog: float,
    weight: float,
    objective: Objective = "per_step",
    rate: float = 0.0,
    earned: float = 0.0,
) -> float:
    """The worth of a step: weighted throughput less the joules that the debt forbids (eq. 8).

    weight: V, J per token/s; what throughput is worth in energy. objective: `per_step` is the paper's, the mean of
    the steps' tokens per second; `renewal` is tokens per second of the whole, Σ tokens ÷ Σ seconds, for which a step
    is worth its tokens less what its seconds give at the present `rate` (tokens/s), and V is J a token. earned: J that
    each token pays off, with a budget a token.
    """
    gain = step.tokens / step.seconds if objective == "per_step" else step.tokens - rate * step.seconds
    return weight * gain - backlog * (step.joules - earned * step.tokens)


def choose_length(
    predict: Callable[[int], Prediction], worth: Callable[[Prediction], float], *, least: int, most: int
) -> int:
    """Number of drafts in least..most of most worth, such as `utility`; of equal ones the smallest."""
    if not 0 <= least <= most:
        raise ValueError(f"drafts from {least} to {most}")
    return max(range(least, most + 1), key=lambda drafts: worth(predict(drafts)))  # the first of equal ones
