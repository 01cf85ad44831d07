"""Models opened from settings."""

from __future__ import annotations

import time

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.fake import FakeEngine
from paceline.errors import ConfigError
from paceline.model_opening import open_model
from paceline.settings import AgentSettings, ServerSettings


def test_an_emulated_pace_is_that_of_this_programs_engine() -> None:
    settings = AgentSettings.model_validate(
        {"model": "fake", "tuning": {"emulate": "rtt=100ms,forward=60ms,row=0.5ms"}}
    )
    engine = open_model(settings, {}).engine
    begin = time.perf_counter()
    engine.forward(Batch((Segment(SeqId(1), 0, (1, 2), None, "all"),)))
    assert time.perf_counter() - begin >= 0.0605


@pytest.mark.parametrize("emulate", [None, "rtt=100ms"])
def test_without_a_pace_the_engine_is_its_own(emulate: str | None) -> None:
    settings = ServerSettings.model_validate({"model": "fake", "tuning": {"emulate": emulate}})
    assert isinstance(open_model(settings, {}).engine, FakeEngine)


def test_a_pace_that_is_none_is_refused_before_a_model_is_loaded() -> None:
    settings = ServerSettings.model_validate({"model": "no/such-model", "tuning": {"emulate": "forward=slow"}})
    with pytest.raises(ConfigError, match="forward=slow"):
        open_model(settings, {})
