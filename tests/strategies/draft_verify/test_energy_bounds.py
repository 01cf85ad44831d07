"""The bounds of specs 2.1 on the loops that serve (`Pace`), over 10,000 steps of some seeds."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.energy import Spent
from paceline.core.offloading import EnergyQueue, OffloadStats, Prediction, Unit, choose_length, utility
from paceline.strategies.draft_verify.pace import Pace
from paceline.wire.verify_messages import VerifyOptions
from tests.depth import DEPTH

STEPS, SEEDS = 10_000, DEPTH
BUDGET, WEIGHT, MOST = 1.2, 10.0, 15  # Table I
DRAFT_S, VERIFY_S = 0.0154, 0.1
LEAST_J, MOST_J = 0.15, 0.2  # of a draft


class Round:
    """A device and its verifier, a round at a time: what a forward costs, and what the verifier accepts, are drawn."""

    def __init__(self, seed: int, options: VerifyOptions, queue: EnergyQueue) -> None:
        self.draw = random.Random(seed)
        self.queue = queue
        self.stats = OffloadStats(queue=queue)
        self.pace = Pace(options, self.stats)
        self.now = 0.0

    def play(self) -> tuple[float, int]:
        """Joules and tokens of a round."""
        draw, pace = self.draw, self.pace
        before, drafts = self.stats.joules, list[float]()
        if pace.begin(0, DRAFT_S, None):
            while not pace.complete:
                pace.tell(Spent(draw.uniform(LEAST_J, MOST_J), 0.0, 0))
                pace.computed(DRAFT_S)
                nats = draw.expovariate(1 / 0.3175)
                if not pace.admits(nats):
                    break
                drafts.append(nats)
            pace.end(4 * len(drafts), None)
        tokens = 1
        for nats in drafts:
            accepted = draw.random() < 0.9**nats
            pace.examined(nats, accepted=accepted)
            if not accepted:
                break
            tokens += 1
        self.now += VERIFY_S + DRAFT_S * len(drafts)
        pace.stats.estimates.verified.add(VERIFY_S)
        pace.came(self.now, tokens)
        return self.stats.joules - before, tokens


@pytest.mark.slow
@pytest.mark.parametrize("per", ["step", "token"])
def test_no_sample_path_exceeds_the_budget_by_more_than_the_debt(per: Unit) -> None:
    """(i), and in the long run the mean is within 2 %, with everything learnt live."""
    for seed in range(SEEDS):
        budget = BUDGET if per == "step" else BUDGET / 8
        queue = EnergyQueue(budget, per=per, weight=1.0)
        world = Round(seed, VerifyOptions(waits=True, overlap=False), queue)
        spent = allowed = 0.0
        for _ in range(STEPS):
            joules, tokens = world.play()
            spent, allowed = spent + joules, allowed + (budget if per == "step" else budget * tokens)
            assert spent - allowed <= queue.backlog + 1e-6
        assert spent <= 1.02 * allowed


@pytest.mark.slow
def test_the_debt_is_bounded_where_the_least_draft_fits_the_budget() -> None:
    """(ii): the debt is at most V ΔΓ ÷ (ε - δ0) + a. ε: what one draft leaves of the budget. δ0: what a step may cost
    beyond its prediction."""
    throughput = (MOST + 1) / VERIFY_S - 1.0 / (VERIFY_S + MOST * DRAFT_S)
    least, beyond = BUDGET - MOST_J, MOST * (MOST_J - LEAST_J)
    assert least > beyond
    bound = WEIGHT * throughput / (least - beyond) + (MOST * MOST_J - BUDGET)
    for seed in range(SEEDS):
        queue = EnergyQueue(BUDGET, weight=WEIGHT)
        world = Round(seed, VerifyOptions(waits=True, overlap=False, gate=False, least=1), queue)
        for _ in range(STEPS):
            world.play()
            assert queue.backlog <= bound


@given(st.floats(0.05, 0.99), st.floats(0.01, 0.5), st.floats(0.0, 1.0), st.floats(0.0, 100.0), st.floats(0.0, 100.0))
def test_with_joules_a_token_a_higher_debt_never_chooses_what_costs_more_beyond_the_budget(
    rho: float, draft_j: float, earned: float, backlog: float, further: float
) -> None:
    """Its drafts may become more: accepted ones earn energy."""

    def predict(drafts: int) -> Prediction:
        tokens = sum(rho**place for place in range(drafts + 1))
        return Prediction(tokens, VERIFY_S + DRAFT_S * drafts, draft_j * drafts)

    def beyond(debt: float) -> float:
        chosen = choose_length(predict, partial(utility, backlog=debt, weight=10.0, earned=earned), least=0, most=MOST)
        return predict(chosen).joules - earned * predict(chosen).tokens

    assert beyond(backlog + further) <= beyond(backlog) + 1e-9
