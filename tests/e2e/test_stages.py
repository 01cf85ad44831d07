"""`paceline serve --stages`: real processes, whose texts are the whole model's, also when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from paceline.commands.demo import Child, Children, command, free_port
from paceline.models import CAUSAL
from tests.depth import DEPTH

STAGES = 2
QUESTIONS = ("What is the capital of France?", "Tell me a story about a dog.", "Who are you?")
LONG = {"max_tokens": 60, "logit_bias": {"4": -100}}  # never ends by itself
KILL_AT = 8  # pieces of text


def start(children: Children, name: str, *flags: str) -> Child:
    port = free_port(0)
    given = (
        "--port",
        str(port),
        "--model",
        CAUSAL,
        "--embedder",
        "hash",
        "--state-dir",
        str(children.directory / name),
    )
    return children.start(name, command("serve", *given, *flags), port=port)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, Child]]:
    """One with its model whole, one with it in stages and a draft model beside them."""
    with Children(tmp_path_factory.mktemp("servers")) as children:
        staged = ("--stages", str(STAGES), "--draft-model", CAUSAL)
        found = start(children, "whole"), start(children, "staged", *staged)
        children.wait(lambda bodies: all(body is not None for body in bodies))
        yield found


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


def streamed(server: Child, asked: dict[str, object], at_piece: Callable[[int], None]) -> str:
    pieces: list[str] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=asked | {"stream": True}, timeout=300, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                pieces.append(piece)
                at_piece(len(pieces))
    return "".join(pieces)


@pytest.mark.parametrize("strategy", ["autoregressive", "lookup_tree", "pipeline"])
def test_texts_are_those_of_the_whole_model(servers: tuple[Child, Child], strategy: str) -> None:
    whole, staged = servers
    for seed, question in enumerate(QUESTIONS):
        asked = body(question, seed, strategy)
        assert text(staged, asked) == text(whole, asked)


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


KILLS = [(number, strategy) for number in range(STAGES) for strategy in ("autoregressive", "lookup_tree")]


@pytest.mark.parametrize(("number", "strategy"), KILLS if DEPTH > 1 else [KILLS[0], KILLS[-1]])
def test_a_stage_that_is_killed_in_mid_answer_costs_no_token(
    servers: tuple[Child, Child], number: int, strategy: str
) -> None:
    whole, staged = servers
    asked = body(QUESTIONS[1], 3 + 2 * number, strategy, **LONG)
    expected = text(whole, asked)
    assert text(staged, asked) == expected, "all stages run: one that a busy machine lost has been started again"
    victim = stage_processes(staged)[number]

    def kill(piece: int) -> None:
        if piece == KILL_AT:
            os.kill(victim.pid, signal.SIGKILL)

    assert streamed(staged, asked, kill) == expected
    assert text(staged, asked) == expected, "and the next request"
    assert len(stage_processes(staged)) == STAGES and victim not in stage_processes(staged)


def test_no_stage_outlives_its_server(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        server = start(children, "staged", "--stages", "1")
        children.wait(lambda bodies: all(body is not None for body in bodies))
        stages = stage_processes(server)
        assert len(stages) == 1
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        gone, alive = psutil.wait_procs(stages, timeout=60)
        assert gone and not alive
        children.members.remove(server)
