"""The entropy gate by hand, eq. 1 in figures, and estimates against what generated the data."""

from __future__ import annotations

import math
import random

import pytest

from paceline.core.clock import AcceptanceByEntropy
from paceline.core.offloading import EntropyGate, ModelShape, StepEstimates

QWEN = ModelShape(layers=24, hidden=896, inner=4864)


def test_the_papers_threshold_and_a_path_by_hand() -> None:
    gate = EntropyGate()
    assert gate.leak == pytest.approx(0.30103, abs=1e-5) and gate.capacity == pytest.approx(0.36124, abs=1e-5)
    assert [gate.admits(nats) for nats in (0.2, 0.5, 0.6)] == [True, True, False]  # levels 0, 0.199, 0.498


def test_a_first_token_of_high_entropy_is_not_drafted() -> None:
    assert not EntropyGate().admits(0.67)  # above 2.2 H_th
    assert EntropyGate().admits(0.66)


def test_operations_of_the_papers_draft_model() -> None:
    """Specs 2.1, by hand: about 615 MFLOP a token behind 500 rows."""
    flops = QWEN.flops(1, 500)
    assert flops == pytest.approx(615e6, rel=0.01)
    with_head = ModelShape(24, 896, 4864, vocab=151_936)
    assert with_head.flops(1, 500) - flops == pytest.approx(272e6, rel=0.01)


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
    assert learnt.at(0.0) == 1.0


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
