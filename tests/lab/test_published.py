"""Strategies as papers describe them: their options reach the machines from a request, and leave the text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.configs import changed
from lab.published import PUBLISHED, DiaaOptions, DragonOptions
from lab.simulation import Simulation
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.wire.codec import decode_part, encode_options
from tests.strategies.cases import MAX_TOKENS, SAMPLINGS, VOCAB, Manner, engines, job
from tests.strategies.conformance.laws import alone

BY_NAME = {strategy.name: strategy for strategy in PUBLISHED}


@pytest.mark.parametrize("options", [DiaaOptions(), DiaaOptions(interval=3, nodes=8, threshold=0.2)])
def test_diaa_writes_the_target_s_text(options: DiaaOptions) -> None:
    assert decode_part(encode_options(options), DiaaOptions) == options
    table, stats = LookupTable(VOCAB), OnlineStats()
    drafted = 0.0
    for sampling in SAMPLINGS.values():
        request = job(BY_NAME["diaa"], "cloud", sampling)
        config = changed(request.config, options=options, table=table, stats=stats)
        answer = Simulation(replace(request, config=config), engines()).run()
        assert answer.tokens == alone("cloud", sampling, Manner(rescoring=True), MAX_TOKENS)
        assert answer.finished is not None
        drafted += answer.finished.stats["drafted"]
    assert drafted > 0 and len(table) > 0


def test_dragon_picks_by_gamma_and_decides_where_it_is_told() -> None:
    texts = []
    for gamma in (0.0, 0.5, 1.0):
        options = DragonOptions(rescoring=False, aggregator="paper", gamma=gamma, keep_at="device")
        request = job(BY_NAME["dragon"], "device", SAMPLINGS["sampled"], manner=Manner("paper", False))
        world = Simulation(replace(request, config=changed(request.config, options=options)), engines())
        texts.append(tuple(world.run().tokens))
    assert len(set(texts)) == 3
