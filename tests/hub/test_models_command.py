"""`paceline models` as a process, against a stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.standin import StandInHub, serving

NAME = "house/tiny"
WEIGHTS = bytes(range(256)) * (1 << 17)  # 32 MiB
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
def hub() -> Iterator[StandInHub]:
    with serving(StandInHub({NAME: FILES})) as hub:
        yield hub


class Machine:
    """A home with a cache of its own, on which commands run."""

    def __init__(self, home: Path, hub: StandInHub) -> None:
        self.cache = home / "hub" / "models--house--tiny"
        kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(NETWORK)}
        self.environment = kept | {"HF_HOME": str(home), "HF_ENDPOINT": hub.url}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline", "models", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def listed(self) -> dict[str, dict[str, object]]:
        return {model["name"]: model for model in json.loads(self.run("list", "--json").stdout)}


@pytest.fixture
def machine(tmp_path: Path, hub: StandInHub) -> Machine:
    return Machine(tmp_path, hub)


def test_a_model_is_fetched_listed_and_removed(machine: Machine, hub: StandInHub) -> None:
    pulled = machine.run("pull", NAME)
    assert (pulled.returncode, "100 %" in pulled.stderr) == (0, True), pulled
    (snapshot,) = (machine.cache / "snapshots").iterdir()
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {file.name for file in snapshot.iterdir()} == wanted
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    model = machine.listed()[NAME]
    assert (model["kind"], model["context"], model["template"], model["where"]) == ("chat", 512, True, "cache main")
    sent = hub.sent
    again = machine.run("pull", NAME, "--json")
    assert json.loads(again.stdout)["fetched"] == 0
    assert hub.sent == sent
    assert machine.run("remove", NAME).stdout.startswith("removed house/tiny, 33.6 MB")
    assert not machine.cache.exists()


CUT = 25_000_000  # bytes sent


def test_what_a_killed_download_has_left_is_not_fetched_again(machine: Machine, hub: StandInHub) -> None:
    hub.withheld_from = CUT
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "models", "pull", NAME], env=machine.environment, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    for line in process.stderr:
        if b" 60 %" in line:
            break
    process.kill()
    process.communicate()
    unfinished = machine.listed()[NAME]
    assert "in part" in str(unfinished["where"])
    held = unfinished["size"]
    assert isinstance(held, int) and held > 0
    hub.withheld_from, hub.sent = None, 0
    assert machine.run("pull", NAME).returncode == 0
    assert hub.sent <= len(WEIGHTS) - held + 1000


def test_what_comes_with_paceline_is_not_removed(machine: Machine, hub: StandInHub) -> None:
    done = machine.run("remove", "demo")
    assert (done.returncode, "demo comes with paceline" in done.stderr, hub.sent) == (2, True, 0), done


OWN = [sys.executable, "-c", "from huggingface_hub import snapshot_download; snapshot_download('house/tiny')"]


def test_huggingface_hub_itself_begins_a_download_anew_after_a_kill(machine: Machine, hub: StandInHub) -> None:
    """Where this fails, `paceline.hub.download.fetch` has a reason less."""
    hub.withheld_from = CUT
    with subprocess.Popen(OWN, env=machine.environment, stderr=subprocess.DEVNULL) as process:
        while hub.sent < CUT:
            assert process.poll() is None
        process.kill()
    hub.withheld_from, hub.sent = None, 0
    subprocess.run(OWN, env=machine.environment, stderr=subprocess.DEVNULL, check=True)
    assert hub.sent >= len(WEIGHTS)


def test_huggingface_hub_itself_makes_a_path_of_a_header(machine: Machine, hub: StandInHub) -> None:
    """Likewise."""
    hub.headers = {"X-Linked-Etag": '"../../../outside"', "ETag": '"../../../outside"'}
    subprocess.run(OWN, env=machine.environment, stderr=subprocess.DEVNULL, check=False)
    assert (machine.cache.parents[1] / "outside").exists()
