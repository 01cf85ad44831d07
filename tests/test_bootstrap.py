"""Models opened from settings."""

from __future__ import annotations

import pytest

from paceline.bootstrap import open_model
from paceline.engine.base import DelayedEngine
from paceline.engine.fake import FakeEngine
from paceline.errors import ConfigError
from paceline.settings import AgentSettings, ServerSettings


def test_an_emulated_pace_is_that_of_this_programs_engine() -> None:
    settings = AgentSettings.model_validate(
        {"model": "fake", "tuning": {"emulate": "rtt=100ms,forward=60ms,row=0.5ms"}}
    )
    engine = open_model(settings, {}).engine
    assert isinstance(engine, DelayedEngine)
    assert (engine.forward_s, engine.row_s) == (0.06, 0.0005)


@pytest.mark.parametrize("emulate", [None, "rtt=100ms"])
def test_without_a_pace_the_engine_is_its_own(emulate: str | None) -> None:
    settings = ServerSettings.model_validate({"model": "fake", "tuning": {"emulate": emulate}})
    assert isinstance(open_model(settings, {}).engine, FakeEngine)


def test_a_pace_that_is_none_is_refused_before_a_model_is_loaded() -> None:
    settings = ServerSettings.model_validate({"model": "no/such-model", "tuning": {"emulate": "forward=slow"}})
    with pytest.raises(ConfigError, match="forward=slow"):
        open_model(settings, {})
