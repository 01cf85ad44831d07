"""What cannot be fetched, and what was fetched before, against a stand-in for the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from paceline.errors import ConfigError
from paceline.hub.download import pull
from paceline.hub.folders import find
from paceline.hub.names import HubName
from tests.hub.standin import COMMIT, StandInHub, serving

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with serving(StandInHub({"house/tiny": FILES})) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("house/nothing", "neither a directory here nor a model on the Hugging Face hub"),
        ("house/tiny@v9", "has no revision v9"),
        ("house/pickled", "only model.bin, and unpickling can run code"),
        ("house/quantised", "it holds GGUF, which is not read"),
        ("house/gated", "accept them on its page"),
        ("house/bare", "no config.json"),
        ("llama3:8b", "a name of Ollama"),
        ("no such model", "no model directory"),
        ("../../etc", "no model directory"),
    ],
)
def test_what_cannot_be_fetched_is_refused_in_a_sentence(hub: StandInHub, name: str, sentence: str) -> None:
    hub.repositories |= {
        "house/pickled": {"config.json": b"{}", "model.bin": b"x"},
        "house/quantised": {"config.json": b"{}", "tiny-q4.gguf": b"GGUF"},
        "house/bare": {"model.safetensors": b"x"},
        "house/gated": FILES,
    }
    hub.gated.add("house/gated")
    with pytest.raises(ConfigError, match=sentence):
        pull(HubName.parse(name))


def test_a_model_for_which_the_disk_has_no_room_is_refused_first(
    hub: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5}))
    with pytest.raises(ConfigError, match=r"has 0\.0 GB free: remove models"):
        pull(HubName.parse("house/tiny"))
    assert hub.sent == 0


def test_a_model_given_by_name_is_fetched_and_a_hub_that_is_down_does_not_matter_then(hub: StandInHub) -> None:
    directory = find("house/tiny")
    assert directory.name == COMMIT
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    hub.down = True
    assert find("house/tiny") == directory
    assert find("house/tiny", download=False) == directory
    with pytest.raises(ConfigError, match="cannot serve house/other now"):
        find("house/other")


def test_a_newer_version_is_fetched_beside_the_older_one(hub: StandInHub) -> None:
    pull(HubName.parse("house/tiny"))
    hub.repositories["house/tiny"] = FILES | {"model.safetensors": b"other weights"}
    pulled = pull(HubName.parse("house/tiny"))
    assert (pulled.fetched, pulled.size) == (len(b"other weights"), len(b"other weights") + 4)
