"""Drafts of tables and the text, in place of the draft model's where they are as likely."""

from __future__ import annotations

import pytest

from lab.configs import a_config
from lab.simulation import Network, SimulatedRequest, Simulation
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.strategies.base import Branch, Side
from paceline.strategies.registry import STRATEGIES
from paceline.wire.verify_messages import VerifyOptions
from tests.strategies.cases import VOCAB

PROMPT = tuple(b"user: go on\nassistant: ")
TOKENS = 80


def written(
    temperature: float, table: LookupTable | None, options: VerifyOptions
) -> tuple[list[int], dict[str, float]]:
    """Text of models that know two tokens back, so that it repeats itself, and the stats of the device."""
    engines: dict[Side, Engine] = {
        "cloud": FakeEngine(seed=1, order=2, spread=0.3),
        "device": FakeEngine(seed=1, order=2, spread=0.5),
    }
    config = a_config(
        "device",
        True,
        SamplingParams(temperature=temperature, seed=3),
        TOKENS,
        frozenset(),
        VOCAB,
        options,
        table=table,
        needs_dists=False,
    )
    branches: dict[Side, tuple[Branch, ...]] = {side: (Branch(PROMPT, None),) for side in engines}
    world = Simulation(
        SimulatedRequest(STRATEGIES["draft_verify"], "device", config, branches),
        engines,
        network=Network((0.02, 0.02)),
        forward={"cloud": 0.05, "device": 0.02},
    )
    tokens = list(world.run().tokens)
    finished = world.session("device").finished
    assert finished is not None
    return tokens, dict(finished.stats)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("waits", [False, True])
def test_a_text_that_repeats_itself_takes_fewer_forwards_of_the_device_and_stays_the_same(
    temperature: float, waits: bool
) -> None:
    options = VerifyOptions(rescoring=False, waits=waits, least=int(waits))
    alone, without = written(temperature, None, options)
    merged, with_tables = written(temperature, LookupTable(VOCAB), options)
    assert merged == alone and len(merged) == TOKENS
    assert without["looked_up"] == 0
    if temperature == 0.0:
        assert with_tables["looked_up"] > TOKENS / 4
        assert with_tables["forwards"] / with_tables["drafted"] < 0.8 * without["forwards"] / without["drafted"]


def test_a_draft_that_is_drawn_is_the_models() -> None:
    options = VerifyOptions(rescoring=False, verifier="truncated")
    _, stats = written(1.0, LookupTable(VOCAB), options)
    assert stats["looked_up"] == 0 and stats["drafted"] > 0
