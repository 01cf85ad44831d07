"""`paceline models` against a stand-in for the hub, and a download that is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.commands.main import build
from tests.hub.standin import StandInHub, asked

NAME = "house/tiny"
WEIGHTS = bytes(range(256)) * (1 << 16)  # 16 MiB
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": "x"}',
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "onnx/model.json": b"{}",
    "README.md": b"",
}
NETWORK = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[StandInHub]:
    with asked(StandInHub({NAME: FILES}), tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def environment(tmp_path: Path, hub: StandInHub) -> dict[str, str]:
    """A process with the same hub and cache."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(NETWORK)}
    return kept | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url}


def models(*arguments: str) -> Result:
    return CliRunner().invoke(build(()), ["models", *arguments])


def listed() -> dict[str, object]:
    found: dict[str, object] = next(
        each for each in json.loads(models("list", "--json").stdout) if each["name"] == NAME
    )
    return found


def test_a_model_is_fetched_listed_and_removed(tmp_path: Path, hub: StandInHub) -> None:
    pulled = models("pull", NAME)
    assert (pulled.exit_code, "100 %" in pulled.stderr) == (0, True), pulled
    cache = tmp_path / "hub" / "models--house--tiny"
    (snapshot,) = (cache / "snapshots").iterdir()
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {file.name for file in snapshot.iterdir()} == wanted
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    model = listed()
    assert (model["kind"], model["context"], model["template"], model["where"]) == ("chat", 512, True, "cache main")
    sent = hub.sent
    assert json.loads(models("pull", NAME, "--json").stdout)["fetched"] == 0
    assert hub.sent == sent
    assert models("remove", NAME).stdout.startswith("removed house/tiny, 16.8 MB")
    assert not cache.exists()
    assert "demo comes with paceline" in str(models("remove", "demo").exception)
    (file := tmp_path / "here.gguf").write_bytes(b"GGUF")
    for command in ("pull", "remove"):
        assert "is here, and not the hub's" in str(models(command, str(file)).exception)
    assert "is a folder" in str(models("import", str(tmp_path)).exception)


CUT = 12_500_000  # bytes sent


def test_what_a_killed_download_has_left_is_not_fetched_again(environment: dict[str, str], hub: StandInHub) -> None:
    hub.withheld_from = CUT
    command = [sys.executable, "-m", "paceline", "models", "pull", NAME]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if b" 60 %" in line:
                break
        process.kill()
    unfinished = listed()
    assert "in part" in str(unfinished["where"])
    held = unfinished["size"]
    assert isinstance(held, int) and held > 0
    hub.withheld_from, hub.sent = None, 0
    assert models("pull", NAME).exit_code == 0
    assert hub.sent <= len(WEIGHTS) - held + 1000


OWN = [sys.executable, "-c", "from huggingface_hub import snapshot_download; snapshot_download('house/tiny')"]


def test_huggingface_hub_itself_begins_a_download_anew_after_a_kill(
    environment: dict[str, str], hub: StandInHub
) -> None:
    """Where this fails, `paceline.hub.download.fetch` has a reason less."""
    hub.withheld_from = CUT
    with subprocess.Popen(OWN, env=environment, stderr=subprocess.DEVNULL) as process:
        assert hub.withheld.wait(60)
        process.kill()
    hub.withheld_from, hub.sent = None, 0
    subprocess.run(OWN, env=environment, stderr=subprocess.DEVNULL, check=True)
    assert hub.sent >= len(WEIGHTS)


def test_huggingface_hub_itself_makes_a_path_of_a_header(
    tmp_path: Path, environment: dict[str, str], hub: StandInHub
) -> None:
    """Likewise."""
    hub.headers = {"X-Linked-Etag": '"../../../outside"', "ETag": '"../../../outside"'}
    subprocess.run(OWN, env=environment, stderr=subprocess.DEVNULL, check=False)
    assert (tmp_path / "outside").exists()
