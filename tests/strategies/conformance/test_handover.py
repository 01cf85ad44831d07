"""`aggregate`: the decision changes sides during an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.simulation import Network, Simulation
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import SIDES, Side
from paceline.strategies.registry import STRATEGIES
from tests.depth import DEPTH
from tests.strategies.cases import CHAIN, MANNERS, SAMPLINGS, engines, job
from tests.strategies.conformance.laws import EVERY_FRONT, EVERY_SAMPLING, reference
from tests.strategies.conformance.worlds import changing_speeds

TOKENS = 24
NETWORKS = {"in order": Network((0.05, 0.15)), "reordering": Network((0.05, 0.15), reorders=True, loss=0.1)}


@EVERY_FRONT
@EVERY_SAMPLING
@pytest.mark.parametrize(
    ("name", "seeds"),
    [("in order", DEPTH), pytest.param("reordering", DEPTH, marks=pytest.mark.slow)],
    ids=list(NETWORKS),
)
def test_the_decision_goes_to_and_fro_and_changes_no_token(
    front: Side, sampling: SamplingParams, name: str, seeds: int
) -> None:
    """After rejections, by chains; every link is long, and the speeds change places. A third of the manners by turns,
    at a greater depth all."""
    strategy = STRATEGIES["aggregate"]
    handed: dict[Side, float] = dict.fromkeys(SIDES, 0.0)
    manners = [replace(each, drafting=CHAIN) for each in MANNERS.values() if not each.private or each.rule == "coin"]
    turn = (SIDES.index(front) + list(SAMPLINGS.values()).index(sampling) + list(NETWORKS).index(name)) % 3
    for manner in manners if DEPTH > 1 else manners[turn::3]:
        expected = reference(strategy, front, sampling, manner, max_tokens=TOKENS)
        for seed in range(seeds):
            world = Simulation(
                job(strategy, front, sampling, manner=manner, max_tokens=TOKENS),
                engines(),
                seed=seed,
                network=NETWORKS[name],
                forward={"cloud": 0.08, "device": 0.04},
            )
            assert world.run(changing_speeds).tokens == expected
            for side in SIDES:
                finish = world.session(side).finished
                handed[side] += 0.0 if finish is None else finish.stats["handovers"]
    assert min(handed.values()) >= 1, handed
