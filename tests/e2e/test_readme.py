"""The README's example requests, word for word, sent to the demonstration's pair: each gets the right answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.commands.demonstration.local_pair import Pair, start_pair
from paceline.commands.processes import Children
from paceline.models import SAMPLES

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
TRUTH = "8:30"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, demo_ports: None) -> Iterator[Pair]:  # noqa: ARG001  # held
    directory = tmp_path_factory.mktemp("demo")
    documents = {"cloud": SAMPLES / "public", "device": SAMPLES / "private"}
    with Children(directory) as children:
        yield start_pair(
            children, documents, model="demo", embedder="minilm", device="laptop", flags=("--threads", "1")
        )


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
