"""Models of a program: which are opened, which are refused, and their emulated pace."""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import AsyncEngine, LoadedModel
from paceline.engine.fake import FakeEngine
from paceline.errors import ConfigError
from paceline.hub.cache import find
from paceline.model_opening import further_models, open_model, opened_model
from paceline.models import CLOUD, shipped
from paceline.runtime.node import Node
from paceline.runtime.served_models import ModelMemory
from paceline.settings import AgentSettings, ServerSettings
from paceline.settings_sources import resolve


def further(*names: str, **settings: object) -> ModelMemory:
    resolved = ServerSettings.model_validate({"model": names, **settings})
    models = shipped("cloud")
    return further_models(resolved, models, open_model(resolved, models), never)


def never(model: LoadedModel, name: str) -> Node:
    raise AssertionError(f"nothing is loaded here: {name}, {model}")


def test_further_models_are_known_before_they_are_loaded(tmp_path: Path) -> None:
    shutil.copytree(CLOUD, tmp_path / "large")
    answers = {"temperature": 0.25, "system": "Be brief."}
    memory = further("demo-causal", "demo", "fake:3", str(tmp_path / "large"), answers=answers)
    found = {slot.info.name: slot for slot in memory.slots}
    assert list(found) == ["demo", "fake:3", "large"]
    assert {slot.state for slot in memory.slots} == {"unloaded"}
    assert [slot.is_joint for slot in memory.slots] == [True, False, True]
    assert (found["large"].info.max_positions, found["demo"].info.max_positions) == (2048, 8192)
    assert all((slot.info.sampling.temperature, slot.info.system) == (0.25, "Be brief.") for slot in memory.slots)
    assert found["large"].weights == (CLOUD / "model.safetensors").stat().st_size


def test_a_further_model_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no model directory"):
        further("fake", "/nowhere/at/all")


def test_processes_for_the_weights_are_started_once_there_is_a_tokenizer(tmp_path: Path) -> None:
    def start(directory: Path, name: str) -> AbstractContextManager[AsyncEngine]:
        raise AssertionError(f"nothing is started for {name} in {directory}")

    shutil.copytree(CLOUD, tmp_path / "large", ignore=shutil.ignore_patterns("tokenizer.json"))
    settings = ServerSettings.model_validate({"model": (str(tmp_path / "large"),)})
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"), opened_model(settings, shipped("cloud"), start):
        pass


def test_two_models_cannot_have_one_name(tmp_path: Path) -> None:
    shutil.copytree(CLOUD, tmp_path / "fake")
    with pytest.raises(ConfigError, match="Two models would be called fake"):
        further("fake", str(tmp_path / "fake"))
    assert [slot.info.name for slot in further("fake", str(tmp_path / "fake"), name="first").slots] == ["fake"]


def test_models_are_named_by_several_flags_by_one_variable_or_by_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paceline.toml").write_text('model = ["fake", "demo"]\n')
    for flags, env in (({}, {}), ({}, {"PACELINE_MODEL": "fake,demo"}), ({"model": ["fake", "demo"]}, {})):
        assert resolve(ServerSettings, flags, env)[0].model == ("fake", "demo")
    (tmp_path / "paceline.toml").write_text('model = "demo-causal"\n')
    assert resolve(ServerSettings, {}, {})[0].model == ("demo-causal",)
    for flags, sentence in (
        ({"model": ["fake", "fake"]}, "fake is named twice"),
        ({"model": ["demo-causal", "fake"], "stages": "2"}, "stages spread one model"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolve(ServerSettings, flags, {})


# ---- names of models that other programs run ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("llama3.2:1b", "a name of Ollama"),
        ("library/qwen2.5:0.5b-instruct", "a name of Ollama"),
        ("model.gguf", "There is no file model.gguf"),
        ("TheBloke/Llama-2-7B-GGUF", "fetch one of them and give its path"),
        ("/nowhere", "no model directory"),
    ],
)
def test_a_name_of_another_kind_of_model_is_refused_with_what_to_give(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find(name, download=False)


# ---- models opened from settings ------------------------------------------------------------------------------------
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
