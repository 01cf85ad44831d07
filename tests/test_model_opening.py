"""Which models are served besides the first, as the settings name them."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from paceline.engine.base import AsyncEngine, LoadedModel
from paceline.errors import ConfigError
from paceline.model_opening import further_models, open_model, opened_model
from paceline.models import CLOUD, shipped
from paceline.runtime.node import Node
from paceline.runtime.served_models import ModelMemory
from paceline.settings import ServerSettings
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


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(("fake", "llama3:8b"), "a name of Ollama"), (("fake", "/nowhere/at/all"), "no model directory")],
)
def test_a_further_model_that_is_none_is_refused_at_the_start(names: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        further(*names)


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
