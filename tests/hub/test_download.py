"""What cannot be fetched, and what was fetched before, against a stand-in for the hub."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from paceline.errors import ConfigError
from paceline.hub import download
from paceline.hub.cache import find
from paceline.hub.download import HubName, pull
from tests.hub.standin import COMMIT, StandInHub, asked, serving

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    with asked(StandInHub({"house/tiny": FILES}), tmp_path / "hub") as hub:
        yield hub


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("house/nothing", "neither a directory here nor a model on the Hugging Face hub"),
        ("house/tiny@v9", "has no revision v9"),
        ("house/pickled", "only model.bin, and unpickling can run code"),
        ("house/quantised", "it holds GGUF files"),
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


def test_a_proxy_of_the_environment_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with (
        pytest.raises(ConfigError, match="the proxy that ALL_PROXY names cannot be used"),
        download._explained(HubName("house/tiny")),
    ):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")


def test_without_a_hub_the_network_is_named(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="check the network"):
        pull(HubName.parse("house/tiny"))
    assert not hub.sent


def _first(described: dict[str, Any]) -> dict[str, Any]:
    """config.json as the hub describes it."""
    return described["siblings"][0]


def _weights(described: dict[str, Any]) -> dict[str, Any]:
    return described["siblings"][2]


LIES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "an absolute id": lambda told, out: _weights(told)["lfs"].update(sha256=f"{out}/x"),
    "an id that leads out": lambda told, _: _weights(told)["lfs"].update(sha256="../../../outside/x"),
    "an id of a small file": lambda told, out: _first(told).update(blobId=f"{out}/x"),
    "an id that is a file here": lambda told, _: _first(told).update(blobId="/etc/passwd"),
    "an id in capitals": lambda told, _: _first(told).update(blobId="A" * 40),
    "an id that is too short": lambda told, _: _first(told).update(blobId="ab"),
    "an id with a line's end": lambda told, _: _first(told).update(blobId="a" * 40 + "\n"),
    "an id that is a number": lambda told, _: _first(told).update(blobId=7),
    "a commit that leads out": lambda told, _: told.update(sha="../../../outside"),
    "an absolute commit": lambda told, out: told.update(sha=str(out / "x")),
    "no commit": lambda told, _: told.update(sha=None),
    "a size below zero": lambda told, _: _first(told).update(size=-1),
    "a size that is none": lambda told, _: _first(told).update(size="12"),
    "a size without end": lambda told, _: _weights(told).update(size=1 << 62),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_hub_calls_its_files_leads_nowhere_else(hub: StandInHub, tmp_path: Path, lie: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    hub.lie = lambda described: LIES[lie](described, outside)
    with pytest.raises(ConfigError, match=r"no such name|which no file has"):
        pull(HubName.parse("house/tiny"))
    assert hub.sent == 0 and not list(outside.iterdir())
    assert not [file for file in tmp_path.rglob("*") if file.is_file() or file.is_symlink()]


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_what_stands_in_the_headers_of_a_hub_becomes_no_path(hub: StandInHub, tmp_path: Path, header: str) -> None:
    hub.headers = {header: '"../../../outside"'}
    directory = pull(HubName.parse("house/tiny")).directory
    assert {file.name for file in directory.iterdir()} == set(FILES)
    assert {path.name for path in tmp_path.iterdir()} == {"hub"}
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {"models--house--tiny"}


def test_a_file_that_does_not_end_is_given_up_at_its_size(hub: StandInHub, tmp_path: Path) -> None:
    hub.endless = True
    with pytest.raises(ConfigError, match="content that is not what the hub says it is"):
        pull(HubName.parse("house/tiny"))
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_content_that_is_not_the_models_is_thrown_away(hub: StandInHub, tmp_path: Path) -> None:
    hub.changed = True
    with pytest.raises(ConfigError, match="content that is not what the hub says it is"):
        pull(HubName.parse("house/tiny"))
    assert not list(tmp_path.rglob("*.partial"))
    hub.changed = False
    assert (pull(HubName.parse("house/tiny")).directory / "model.safetensors").read_bytes() == b"weights"


def test_files_with_names_that_lead_elsewhere_are_not_fetched(hub: StandInHub) -> None:
    hub.repositories["house/tiny"] = FILES | {"..\\..\\x.json": b"x", "/tmp/x.json": b"x", "a/../../x.json": b"x"}
    assert {file.name for file in pull(HubName.parse("house/tiny")).directory.iterdir()} == set(FILES)


def test_a_revision_that_is_a_path_is_no_name() -> None:
    for name in ("house/tiny@/etc", "house/tiny@../x"):
        with pytest.raises(ConfigError, match="no model directory"):
            HubName.parse(name)


def test_every_part_of_a_path_in_the_cache_is_a_constant_or_has_been_checked() -> None:
    for file in (Path(download.__file__).parent).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                part = node.right
                checked = isinstance(part, ast.Call) and getattr(part.func, "id", "") == "path_part"
                number = isinstance(part, ast.Constant)
                arithmetic = isinstance(node.left, ast.Constant) and isinstance(node.left.value, int)  # 1 / x
                assert checked or number or arithmetic, f"{file.name}:{node.lineno}: {ast.unparse(node)}"


@pytest.fixture
def storage() -> Iterator[StandInHub]:
    with serving(StandInHub({"house/tiny": FILES})) as storage:
        storage.url = storage.url.replace("127.0.0.1", "localhost")  # another host
        yield storage


def test_large_files_come_from_another_host_which_is_not_told_the_token(
    hub: StandInHub, storage: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1)
    hub.storage, storage.cut_after, storage.cuts = storage, 3, 1
    directory = pull(HubName.parse("house/tiny")).directory
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert storage.ranges == ["bytes=3-"], "a signature may have run out meanwhile, so the hub is asked for a new one"
    assert hub.tokens == {"Bearer hf_secret"} and not storage.tokens
    assert storage.sent == len(b"weights")


def test_a_token_that_the_hub_does_not_know_is_named(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    hub.wrong_token = "hf_old"
    with pytest.raises(ConfigError, match="does not know the token of HF_TOKEN"):
        pull(HubName.parse("house/tiny"))


def test_a_server_that_ignores_ranges_sends_all_again(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1)
    hub.cut_after, hub.cuts, hub.ignores_ranges = 3, 1, True
    assert (pull(HubName.parse("house/tiny")).directory / "model.safetensors").read_bytes() == b"weights"
