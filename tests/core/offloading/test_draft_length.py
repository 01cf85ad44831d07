"""The outer loop's choice against every other, the gate and the estimates.

Its bounds: `tests/strategies/draft_verify/test_energy.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import AcceptanceByEntropy
from paceline.core.offloading import (
    EnergyQueue,
    EntropyGate,
    ModelShape,
    Prediction,
    StepEstimates,
    choose_length,
    utility,
)

MOST = 15
shares = st.floats(0.05, 0.99)


def expected_tokens(rho: float, drafts: int) -> float:
    """Equation 6."""
    return drafts + 1.0 if rho == 1.0 else (1.0 - rho ** (drafts + 1)) / (1.0 - rho)


def steps_of(rho: float, draft_s: float, send_s: float, verify_s: float) -> Callable[[int], Prediction]:
    """A device of 12 W that sends with 0.2 W (Table I)."""

    def predict(drafts: int) -> Prediction:
        seconds = drafts * (draft_s + send_s) + verify_s
        return Prediction(expected_tokens(rho, drafts), seconds, drafts * (12.0 * draft_s + 0.2 * send_s))

    return predict


@given(
    shares,
    st.floats(0.001, 0.1),
    st.floats(0.0, 0.5),
    st.floats(0.01, 0.5),
    st.floats(0.0, 99.0),
    st.floats(0, 1),
    st.integers(0, 1),
)
def test_no_other_number_of_drafts_has_more_utility(
    rho: float, draft_s: float, send_s: float, verify_s: float, backlog: float, earned: float, least: int
) -> None:
    """A higher debt then never chooses what costs more beyond the budget: its drafts become more only where accepted
    ones earn energy."""
    predict = steps_of(rho, draft_s, send_s, verify_s)

    def worth(drafts: int) -> float:
        step = predict(drafts)
        return 10.0 * (step.tokens / step.seconds) - backlog * (step.joules - earned * step.tokens)

    same = partial(utility, backlog=backlog, weight=10.0, earned=earned)
    chosen = choose_length(predict, same, least=least, most=MOST)
    assert all(worth(chosen) > worth(less) for less in range(least, chosen))
    assert all(worth(chosen) >= worth(more) for more in range(chosen, MOST + 1))


def test_equal_utility_takes_the_fewest_drafts_and_none_may_be_best() -> None:
    same = Prediction(2.0, 1.0, 0.0)
    worth = partial(utility, backlog=0.0, weight=1.0)
    assert choose_length(lambda _: same, worth, least=2, most=9) == 2
    useless = steps_of(0.05, 0.1, 0.5, 0.05)
    assert choose_length(useless, worth, least=0, most=9) == 0
    with pytest.raises(ValueError, match="drafts from 3 to 2"):
        choose_length(lambda _: same, worth, least=3, most=2)


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="energy budget of -1"):
        EnergyQueue(-1.0)


# ---- the entropy gate by hand, eq. 1 in figures, and estimates against what generated the data ----------------------
QWEN = ModelShape(layers=24, hidden=896, inner=4864)


def test_the_papers_threshold_and_a_path_by_hand() -> None:
    gate = EntropyGate()
    assert gate.leak == pytest.approx(0.30103, abs=1e-5) and gate.capacity == pytest.approx(0.36124, abs=1e-5)
    assert [gate.admits(nats) for nats in (0.2, 0.5, 0.6)] == [True, True, False]  # levels 0, 0.199, 0.498


def test_a_first_token_of_high_entropy_is_not_drafted() -> None:
    assert not EntropyGate().admits(0.67)  # above 2.2 H_th
    assert EntropyGate().admits(0.66)


def test_grouped_queries_take_less_and_a_gate_more() -> None:
    grouped = ModelShape(24, 896, 4864, kv_share=2 / 14)
    gated = ModelShape(24, 896, 4864, matrices=3)
    assert grouped.flops(1, 0) < QWEN.flops(1, 0) < gated.flops(1, 0)
    assert QWEN.flops(4, 100) > 4 * QWEN.flops(1, 100)  # later drafts see the earlier ones


@pytest.mark.parametrize("true_slope", [0.1, 0.35, 1.5])
def test_acceptance_by_entropy_is_learnt(true_slope: float) -> None:
    draw, learnt = random.Random(7), AcceptanceByEntropy()
    slopes = []
    for step in range(8_000):
        nats = draw.expovariate(1 / 0.6)
        learnt.add(nats, accepted=draw.random() < math.exp(-true_slope * nats))
        if step > 4_000:
            slopes.append(learnt.slope)
    assert sum(slopes) / len(slopes) == pytest.approx(true_slope, rel=0.1)


def test_predictions_without_early_ends_are_equation_6() -> None:
    estimates = StepEstimates(acceptance=0.8, verify_s=0.1)
    step = estimates.predict(5, draft_s=0.02, draft_j=0.2, send_s=0.01, send_j=0.002)
    assert step.tokens == pytest.approx((1 - 0.8**6) / 0.2)
    assert step.seconds == pytest.approx(5 * 0.03 + 0.1)
    assert step.joules == pytest.approx(5 * 0.202)
    assert estimates.predict(0, draft_s=1, draft_j=1, send_s=1, send_j=1).tokens == 1.0


def test_chains_that_end_early_are_expected_to() -> None:
    """Else the outer loop would count energy that the gate saves, and draft too little or over budget (specs 2.2)."""
    estimates = StepEstimates()
    for _ in range(200):
        estimates.add_chain(4, 2)
    assert [round(estimates.reach(place), 3) for place in range(4)] == [1.0, 1.0, 0.0, 0.0]
    longer = estimates.predict(9, draft_s=1.0, draft_j=1.0, send_s=0.0, send_j=0.0)
    assert longer.joules == pytest.approx(2.0)
