"""`lookup_tree` with a draft model: faster where that pays, as fast as without it where not, and the same text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lab.configs import changed
from lab.engines import Arbitrary, Noisy
from lab.simulation import SimulatedRequest, Simulation
from lab.simulation.host import Accelerator
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.registry import STRATEGIES
from tests.strategies.cases import MAX_TOKENS, SAMPLINGS, VOCAB, Manner, engines, job
from tests.strategies.conformance.laws import alone
from tests.strategies.pipeline.worlds import ALONE

TARGET_S = 0.1
TOKENS = 90


@cache
def took(draft_s: float | None, count: int = 1, *, shared: bool = False) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Seconds of two turns of so many answers with common tables and statistics, and the texts. draft_s: of the draft
    model's forward; None: there is none. shared: both models compute on one accelerator."""
    table, stats = LookupTable(VOCAB), OnlineStats()
    seconds, texts = 0.0, list[tuple[int, ...]]()

    def request(seed: int) -> SimulatedRequest:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        this = job(STRATEGIES["lookup_tree"], "cloud", sampling, branches=ALONE, max_tokens=TOKENS, eos_ids=frozenset())
        return replace(this, config=changed(this.config, table=table, stats=stats, needs_dists=False))

    for turn in range(2):
        world = Simulation(
            [request(10 * turn + index) for index in range(count)],
            {"cloud": FakeEngine(seed=1, spread=0.1)},
            forward={"cloud": lambda rows: TARGET_S + 0.0003 * rows},
            drafts={} if draft_s is None else {"cloud": (FakeEngine(seed=2, spread=0.1), draft_s)},
            accelerators={"cloud": Accelerator()} if shared else None,
        )
        world.run(checks=False)
        seconds += world.now
        texts += [tuple(answer.tokens) for answer in world.answers]
    return seconds, tuple(texts)


@pytest.mark.parametrize(("count", "shared"), [(1, True), (3, False)])
def test_a_cheap_model_that_is_often_right_makes_answers_faster(count: int, shared: bool) -> None:
    plain_s, texts = took(None, count)
    ours_s, ours = took(0.01, count, shared=shared)
    assert ours == texts and ours_s < 0.9 * plain_s


@pytest.mark.parametrize(("count", "shared"), [(1, False), (3, True)])
def test_a_model_as_slow_as_the_target_costs_next_to_nothing(count: int, shared: bool) -> None:
    plain_s, texts = took(None, count)
    ours_s, ours = took(TARGET_S, count, shared=shared)
    assert ours == texts and ours_s < 1.07 * plain_s


@pytest.mark.parametrize("rescoring", [False, True])
def test_text_is_the_target_s_for_any_model_and_any_time_it_takes(rescoring: bool) -> None:
    manner = Manner(rescoring=rescoring)
    models: list[tuple[Engine, float]] = [
        (Noisy(engines()["cloud"], 0.3), 0.001),
        (Arbitrary(FakeEngine(seed=3)), 0.02),
        (FakeEngine(seed=1, spread=0.3, max_positions=60), 0.003),
    ]
    for sampling, model in zip(SAMPLINGS.values(), models, strict=True):
        request = job(STRATEGIES["lookup_tree"], "cloud", sampling, manner=manner)
        stats = OnlineStats()
        for _ in range(3):
            config = changed(request.config, stats=stats)
            world = Simulation(replace(request, config=config), engines(), drafts={"cloud": model})
            assert world.run().tokens == alone("cloud", sampling, manner, MAX_TOKENS)
