"""Joint answers with real processes and real clients: two programs answer one chat request together."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from paceline.strategies.base import SIDES, Side
from tests.e2e.pair import QUESTION, Pair

MAX_TOKENS = 48


def request(**more: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "fake", "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 11, **more}


def test_a_private_document_is_named_at_the_device_and_nowhere_else(pair: Pair) -> None:
    bodies: dict[Side, str] = {}
    for side in SIDES:
        body = request(paceline={"report": True})
        address, kind = f"{pair.url(side)}/v1/chat/completions", "content-type: application/json"
        command = ["curl", "-s", address, "-H", kind, "-d", json.dumps(body)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        bodies[side] = done.stdout
    assert "Velda" in bodies["device"] and "device.md" in bodies["device"]
    assert "Velda" not in bodies["cloud"] and "device.md" not in bodies["cloud"]
    assert "Velda" not in pair.started.cloud.log.read_text()
    for file in (pair.directory / "cloud").rglob("*"):
        if file.is_file():
            assert b"Velda" not in file.read_bytes(), file


def test_many_answers_at_once_are_each_their_own(pair: Pair) -> None:
    """Eight sessions over one link: no cross-talk."""
    client = pair.client("device")

    def answer(seed: int) -> str | None:
        return client.chat.completions.create(**request(seed=seed)).choices[0].message.content

    alone = [answer(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, range(8))) == alone


def test_at_the_level_answer_private_the_device_writes_with_what_the_cloud_finds(pair: Pair) -> None:
    private = {"privacy": "answer-private", "report": True}
    body = request() | {"messages": [{"role": "user", "content": "When does the harbour library open?"}]}
    whole = pair.client("device").chat.completions.create(**body, extra_body={"paceline": private})
    assert whole.model_extra is not None
    report = whole.model_extra["paceline"]
    assert (report["strategy"], report["degraded"]) == ("lookup_tree", None)
    assert {citation["side"] for citation in report["citations"]} == set(SIDES)
    sent = {stat for stat in report["stats"] if stat.startswith("sent_")}
    assert {"sent_open_bytes"} <= sent <= {"sent_open_bytes", "sent_close_bytes"}  # either side may close first
    with pytest.raises(BadRequestError, match="ask the device"):
        pair.client("cloud").chat.completions.create(**body, extra_body={"paceline": private})


def streamed(client: OpenAI) -> str:
    chunks = client.chat.completions.create(**request(), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def curled(url: str, body: dict[str, Any]) -> list[str]:
    """The `data:` lines received by `curl -N`."""
    done = subprocess.run(
        ["curl", "-sN", f"{url}/v1/chat/completions", "-H", "content-type: application/json", "-d", json.dumps(body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("side", SIDES)
def test_openai_and_curl_get_the_same_text_streamed_and_whole(pair: Pair, side: Side) -> None:
    client = pair.client(side)
    whole = client.chat.completions.create(**request(), extra_body={"paceline": {"report": True}})
    assert whole.model_extra is not None and whole.model_extra["paceline"]["strategy"] == "aggregate"
    assert whole.model_extra["paceline"]["degraded"] is None
    text = whole.choices[0].message.content
    assert text
    assert streamed(client) == text
    *chunks, done = curled(pair.url(side), request(stream=True))
    assert done == "[DONE]"
    pieces = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == text
    assert whole.usage is not None and whole.usage.completion_tokens <= MAX_TOKENS
