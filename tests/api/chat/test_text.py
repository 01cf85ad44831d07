"""Text through a real server and socket: streamed as in one piece, truncated exactly, every byte counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any  # parsed JSON

import httpx
import numpy as np
import pytest

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.core.sampling.dist import Dist
from paceline.engine.base import LoadedModel
from paceline.engine.fake import EOS, VOCAB, ByteTokenizer, FakeEngine
from paceline.runtime.node import Node
from tests.api.chat.test_output import stream, whole
from tests.api.chat.test_tools import TOOLS, joined
from tests.api.scripted import client_of, running

FEW = ("Größe\n\ndata: [DONE]\n\nnaïve", "उत्तर बयालीस है", "👩‍👩‍👧‍👦🏳️‍🌈😀")
GREEDY: dict[str, object] = {"model": "fake", "temperature": 0}
FROB: dict[str, object] = {"type": "frob"}


class Reciter(FakeEngine):
    """An engine whose answer is `text`, one byte per token: each next byte has probability 0.9, all others 0.1."""

    text = b""

    def _dist(self, row: Any) -> Dist:
        token = self.text[row.answer_rows] if row.answer_rows < len(self.text) else EOS
        probs = np.full(VOCAB, 0.1 / (VOCAB - 1))
        probs[token] = 0.9
        return Dist.dense(probs)


@pytest.fixture(scope="module")
def _program() -> Iterator[tuple[Reciter, httpx.Client]]:
    engine = Reciter()
    node = Node("cloud", LoadedModel(engine, ByteTokenizer()), None)
    with running(create_app(node, keyring=Keyring({})), node) as url, client_of(url) as client:
        yield engine, client


@pytest.fixture
def reciter(_program: tuple[Reciter, httpx.Client]) -> Reciter:
    return _program[0]


@pytest.fixture
def http(_program: tuple[Reciter, httpx.Client]) -> httpx.Client:
    return _program[1]


def both(http: httpx.Client, **fields: object) -> tuple[str, str, dict[str, int]]:
    """(text, finish_reason, usage) of a streamed and a whole answer, after a check that they agree."""
    answer = whole(http, **GREEDY | fields)
    choice = answer["choices"][0]
    *chunks, last = stream(http, **GREEDY | fields, stream_options={"include_usage": True})
    message = joined(chunks)
    assert message == choice["message"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][count] == answer["usage"][count]  # the number of draft tokens may differ
    return message["content"], choice["finish_reason"], answer["usage"]


@pytest.mark.parametrize("text", FEW)
def test_every_script_arrives_whole(http: httpx.Client, reciter: Reciter, text: str) -> None:
    reciter.text = text.encode()
    received, reason, usage = both(http)
    assert (received, reason) == (text, "stop") and "\ufffd" not in received
    prompt = len(ByteTokenizer().chat([{"role": "user", "content": "Hi"}]))
    assert usage["prompt_tokens"] == prompt
    assert usage["completion_tokens"] == len(reciter.text), "the end of text is no token of it"
    assert usage["total_tokens"] == prompt + usage["completion_tokens"]


@pytest.mark.parametrize("text", FEW)
def test_half_a_character_at_the_limit_is_dropped(http: httpx.Client, reciter: Reciter, text: str) -> None:
    reciter.text = text.encode()
    for limit in range(1, min(len(reciter.text), 10)):
        received, reason, usage = both(http, max_tokens=limit)
        assert received == reciter.text[:limit].decode(errors="ignore")
        assert (reason, usage["completion_tokens"]) == ("length", limit)


@pytest.mark.parametrize("text", FEW)
def test_a_stop_string_never_shows(http: httpx.Client, reciter: Reciter, text: str) -> None:
    reciter.text = text.encode()
    for at in (0, 1, len(text) // 2, len(text) - 1):
        for stop in (text[at], text[at : at + 4]):
            received, reason, _ = both(http, stop=[stop, "\U0001f6d1"])
            assert (received, reason) == (text[: text.find(stop)], "stop")
        received, reason, _ = both(http, stop=text[at:] + "!")
        assert (received, reason) == (text, "stop"), "held text comes at the end"


def test_invalid_bytes_are_replaced_alike_in_both(http: httpx.Client, reciter: Reciter) -> None:
    reciter.text = b"a\xff\xc3(b\xf0\x9f"
    assert both(http)[0] == "a\ufffd\ufffd(b"


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})],
)
def test_a_model_that_writes_something_else_makes_the_required_call(
    http: httpx.Client, reciter: Reciter, choice: object, names: set[str]
) -> None:
    reciter.text = b'I would rather not call anything, {"city": 5}.'
    fields: dict[str, object] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(2):
        answer = whole(http, **GREEDY | fields | {"temperature": 2, "top_p": 1, "seed": seed, "max_tokens": 1000})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] in names
        if answer["choices"][0]["finish_reason"] != "length":
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} or isinstance(arguments["city"], str)
