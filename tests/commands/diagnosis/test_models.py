"""What `paceline doctor` says of a model of the settings, without loading it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from paceline.commands import diagnosis
from paceline.commands.diagnosis import model
from paceline.errors import ConfigError
from paceline.hub.download import HubName, Unreachable
from paceline.models import DEVICE, READER
from paceline.settings import ServerSettings

SETTINGS = ServerSettings()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that can be loaded."""
    return Path(shutil.copytree(DEVICE, tmp_path / "model"))


def test_a_model_that_can_be_loaded_is_fine() -> None:
    for wanted in ("demo", "demo-causal", "fake:3", str(DEVICE)):
        status, text = model(SETTINGS, wanted)
        assert status == "ok" and text.startswith(f"{wanted}: ")
        assert wanted.startswith("fake") or ("million weights" in text and "GiB free" in text)


def test_a_cut_file_a_missing_part_and_a_missing_configuration_are_named(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=rf"{weights.name} is damaged or was cut"):
        model(SETTINGS, str(folder))
    weights.write_bytes(whole)
    (folder / diagnosis.INDEX).write_text(json.dumps({"weight_map": {"a": weights.name, "b": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 files of its weights, among them model-2\.safetensors"):
        model(SETTINGS, str(folder))
    (folder / diagnosis.INDEX).unlink()
    save_file({}, weights)
    with pytest.raises(ConfigError, match="has no weights"):
        model(SETTINGS, str(folder))
    (folder / diagnosis.INDEX).write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json cannot be read"):
        model(SETTINGS, str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        model(SETTINGS, str(folder))


def test_a_model_without_a_template_is_a_warning(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    status, text = model(SETTINGS, str(folder))
    assert status == "warn" and "ChatML" in text


@pytest.mark.parametrize(("free", "total", "status"), [(1 << 20, 1 << 40, "warn"), (1 << 20, 1 << 20, "fail")])
def test_memory_that_is_short_is_said(monkeypatch: pytest.MonkeyPatch, free: int, total: int, status: str) -> None:
    monkeypatch.setattr("paceline.model_opening.memory_of", lambda _: (free, total))
    found, text = model(SETTINGS, str(READER))
    assert found == status and "choose a smaller model" in text


def test_a_model_of_the_hub_that_is_not_here_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.hub.download.remote_size", lambda _: 988_000_000)
    status, text = model(SETTINGS, "nobody/nothing")
    assert status == "warn" and "1.0 GB" in text and "paceline models pull nobody/nothing" in text


def test_without_network_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: HubName) -> int:
        raise Unreachable(f"{name} cannot be fetched")

    monkeypatch.setattr("paceline.hub.download.remote_size", unreachable)
    status, text = model(SETTINGS, "nobody/nothing")
    assert status == "warn" and "the hub cannot be asked" in text


def test_a_name_that_is_no_model_fails_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="GGUF"):
        model(SETTINGS, "llama3:8b")
