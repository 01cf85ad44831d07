"""Stages in processes of their own: their texts, their memory, how they are enrolled, and killed ones."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from transformers import LlamaConfig

import paceline.models
from paceline.commands.demo import Child, Children, clean_environment, command, free_port
from paceline.commands.main import build
from paceline.errors import ConfigError
from paceline.models import CAUSAL
from tests.depth import DEPTH
from tests.e2e.pair import started
from tests.engine.checkpoints import save
from tests.reliability.streams import Stream

STAGES = 2
QUESTIONS = ("What is the capital of France?", "Tell me a story about a dog.", "Who are you?")
MODEL = ("--model", CAUSAL, "--embedder", "hash")
LONG = {"max_tokens": 60, "logit_bias": {"4": -100}}  # never ends by itself
KILL_AT = 8  # pieces of text


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, Child]]:
    """One with its model whole, one with it in stages and a draft model beside them."""
    with Children(tmp_path_factory.mktemp("servers")) as children:
        staged = ("--stages", str(STAGES), "--draft-model", CAUSAL)
        yield started(children, "whole", "serve", *MODEL), started(children, "staged", "serve", *MODEL, *staged)


def stage_processes(server: Child) -> list[psutil.Process]:
    """Oldest first, each with the layers that it was told."""
    children = psutil.Process(server.process.pid).children()
    return sorted((each for each in children if "stage" in each.cmdline()), key=lambda each: each.create_time())


def body(question: str, seed: int, strategy: str, **more: object) -> dict[str, object]:
    return {
        "model": CAUSAL,
        "messages": [{"role": "user", "content": question}],
        "temperature": float(seed % 2),
        "seed": seed,
        "max_tokens": 24,
        "paceline": {"strategy": strategy},
        **more,
    }


def text(server: Child, asked: dict[str, object]) -> str:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("strategy", ["autoregressive", "lookup_tree", "pipeline"])
def test_texts_are_those_of_the_whole_model(servers: tuple[Child, Child], strategy: str) -> None:
    whole, staged = servers
    for seed, question in enumerate(QUESTIONS):
        asked = body(question, seed, strategy)
        assert text(staged, asked) == text(whole, asked)


KILLS = [(number, strategy) for number in range(STAGES) for strategy in ("autoregressive", "lookup_tree")]


@pytest.mark.parametrize(("number", "strategy"), KILLS if DEPTH > 1 else KILLS[-1:])
def test_a_stage_that_is_killed_in_mid_answer_costs_no_token(
    servers: tuple[Child, Child], number: int, strategy: str
) -> None:
    whole, staged = servers
    asked = body(QUESTIONS[1], 3 + 2 * number, strategy, **LONG)
    expected = text(whole, asked)
    assert text(staged, asked) == expected, "all stages run: one that a busy machine lost has been started again"
    victim = stage_processes(staged)[number]

    answer = Stream(staged.url, asked)
    answer.wait_for(KILL_AT)
    os.kill(victim.pid, signal.SIGKILL)
    assert answer.join().text == expected and answer.whole
    assert text(staged, asked) == expected, "and the next request"
    assert len(stage_processes(staged)) == STAGES and victim not in stage_processes(staged)


def test_log_probabilities_and_constraints_come_from_the_last_stage(servers: tuple[Child, Child]) -> None:
    whole, staged = servers
    shape = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    schema = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": shape}}
    for more in ({"logprobs": True, "top_logprobs": 3}, {"response_format": schema}, {"presence_penalty": 1.5}):
        asked = body(QUESTIONS[0], 1, "autoregressive", **more)
        found, expected = (
            httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=300, trust_env=False).json()
            for server in (staged, whole)
        )
        assert found["choices"][0]["message"] == expected["choices"][0]["message"]
        for one, other in zip(*(_logprobs(each) for each in (found, expected)), strict=True):
            assert one["token"] == other["token"] and abs(one["logprob"] - other["logprob"]) < 1e-3


def _logprobs(answer: dict[str, object]) -> list[dict[str, object]]:
    found = answer["choices"][0]["logprobs"]  # type: ignore[index]  # OpenAI's shape
    return [] if found is None else list(found["content"])


# ---- `paceline stage` by itself -------------------------------------------------------------------------------------
DEVICE = Path(paceline.models.__file__).parent / "device"  # of six layers
MIB = 1 << 20
START_S = 180
CREDENTIAL = json.dumps({"name": "s"} | dict.fromkeys(("seed", "head_key"), base64.b64encode(bytes(32)).decode()))


@contextmanager
def stage(*flags: str, log: Path, given: str = "") -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A stage's process and its first two lines: what it holds, its address. given: a line of its input."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command("stage", *flags),
            env=clean_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{given}\n")
        process.stdin.flush()
        lines = [process.stdout.readline().strip() for _ in range(2)]
        assert all(lines), log.read_text()
        yield process, lines
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def resident_mib(lines: list[str]) -> int:
    found = re.search(r"(\d+) MiB resident", lines[0])
    assert found is not None
    return int(found[1])


def test_a_stage_has_its_own_layers_in_memory_and_no_others(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 512, "intermediate_size": 2048, "max_position_embeddings": 96}
    directory = save(LlamaConfig(**sizes, num_hidden_layers=8, num_attention_heads=8), tmp_path / "model")
    layer_mib = (4 * 512**2 + 3 * 512 * 2048) * 4 / MIB
    held = {}
    for layers in ("0:8", "2:4"):
        flags = ("--model", str(directory), "--layers", layers, "--kv-mib", "16", "--credential", "-")
        with stage(*flags, log=tmp_path / "log", given=CREDENTIAL) as (_, lines):
            held[layers] = resident_mib(lines)
    assert held["0:8"] - held["2:4"] > 0.8 * 6 * layer_mib, held


def test_stages_enrol_at_a_server_that_then_runs_on_them(tmp_path: Path) -> None:
    state = tmp_path / "cloud"
    with Children(tmp_path) as children:
        port = free_port(0)
        address = f"http://127.0.0.1:{port}"
        common = ("--port", str(port), "--state-dir", str(state), "--embedder", "hash")
        children.start("plain", command("serve", "--model", "fake", *common), port=port)
        children.wait(lambda bodies: all(body is not None for body in bodies))
        codes = {
            name: children.run(command("devices", "add", name, "--role", "stage", "--state-dir", str(state))).strip()
            for name in ("rack1", "rack2")
        }

        def flags(name: str, layers: str, listen: str = "127.0.0.1:0") -> tuple[str, ...]:
            own = ("--state-dir", str(tmp_path / name), "--server", address, "--listen", listen)
            return ("--model", str(DEVICE), "--layers", layers, "--log-level", "warning", *own)

        with (
            stage(*flags("rack1", "0:3"), "--code", "-", log=tmp_path / "1", given=codes["rack1"]) as (_, first),
            stage(*flags("rack2", "3:6"), "--code", "-", log=tmp_path / "2", given=codes["rack2"]) as (
                lost,
                second,
            ),
        ):
            children.stop()
            children.members.clear()
            where = [lines[1].rsplit(" ", 1)[1] for lines in (first, second)]
            server = children.start(
                "staged",
                command("serve", "--model", str(DEVICE), "--stages", ",".join(reversed(where)), *common),
                port=port,
            )
            children.wait(lambda bodies: all(body is not None for body in bodies))
            expected = _post(address).raise_for_status().json()["choices"][0]["message"]["content"]
            assert expected
            os.kill(lost.pid, signal.SIGKILL)
            lost.wait()
            answer = _post(address)
            told = answer.json()["error"]
            assert answer.status_code == 503 and answer.headers["retry-after"] and server.process.poll() is None
            assert told["code"] == "model_unavailable" and "127.0.0.1" not in answer.text
            unready = httpx.get(f"{address}/readyz", trust_env=False)
            assert unready.status_code == 503 and "cannot run now" in unready.json()["engine"]
            assert "127.0.0.1" not in unready.text
            again = flags("rack2", "3:6", where[1])
            with stage(*again, log=tmp_path / "3") as (_, lines):
                assert lines[1].endswith(where[1])
                deadline = time.monotonic() + START_S
                while (answer := _post(address)).status_code != 200:
                    assert time.monotonic() < deadline, answer.text
                assert answer.json()["choices"][0]["message"]["content"] == expected
                assert httpx.get(f"{address}/readyz", trust_env=False).json()["ready"] is True


def _post(address: str) -> httpx.Response:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    asked = {"model": "device", "messages": messages, "max_tokens": 12, "temperature": 0}
    return httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=120, trust_env=False)


def test_layers_that_a_model_does_not_have_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{CREDENTIAL}\n"))
    arguments = ["stage", "--model", str(DEVICE), "--layers", "0:99", "--credential", "-"]
    with pytest.raises(ConfigError, match="has layers 0 to 5; 0 to 98 is not a span of them"):
        build()(arguments, standalone_mode=False)


def test_no_stage_outlives_its_server(servers: tuple[Child, Child]) -> None:
    """The last: it ends the server that the others share."""
    _, staged = servers
    stages = stage_processes(staged)
    assert len(stages) == STAGES
    os.kill(staged.process.pid, signal.SIGKILL)
    staged.process.wait()
    gone, alive = psutil.wait_procs(stages, timeout=60)
    assert gone and not alive
