"""Requests as clients of coding and chat send them: recorded on a loopback address, their texts replaced by filler.

Each file of `recorded/` has the client and its version, the path, the headers and the body. They are renewed by asking
each client once, with a server that writes down what comes, and replacing every text that is not a name.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.scripted import ScriptedService
from tests.api.surfaces.test_anthropic import IMAGE, joined

RECORDED = Path(__file__).with_name("recorded")
NAMES = sorted(file.stem for file in RECORDED.glob("*.json"))
ANSWERED = [name for name in NAMES if name != "claude_code_count"]
ANSWER = "Hello there."


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def sent(http: httpx.Client, request: dict[str, Any]) -> httpx.Response:
    return http.post(request["path"], json=request["body"], headers=request["headers"])


def events_of(text: str) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(path: str, response: httpx.Response) -> str:
    """The text that a client reads, of a stream that has begun and ended as its API says."""
    events = events_of(response.text)
    if path.startswith("/v1/messages"):
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        (block,) = joined(events)["content"]
        return str(block["text"])
    if path.startswith("/v1/responses"):
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
        return str(events[-1]["response"]["output"][0]["content"][0]["text"])
    if not events:
        return str(response.json()["choices"][0]["message"]["content"])
    assert response.text.endswith("data: [DONE]\n\n")
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@pytest.mark.parametrize("name", ANSWERED)
def test_a_recorded_request_is_answered(http: httpx.Client, name: str) -> None:
    request = recorded(name)
    response = sent(http, request)
    assert response.status_code == 200, response.text
    assert text_of(request["path"], response) == ANSWER


def test_a_recorded_count_counts(http: httpx.Client) -> None:
    response = sent(http, recorded("claude_code_count"))
    assert response.status_code == 200 and response.json()["input_tokens"] > 1000, "of tools, most of all"


def prompt(service: ScriptedService) -> str:
    return "\n".join(message["content"] for message in service.requests[-1].prompt.messages)


def test_a_system_message_stays_in_its_place_and_a_pdf_that_a_tool_has_read_is_read_too(
    http: httpx.Client, service: ScriptedService
) -> None:
    sent(http, recorded("claude_code_after_tools"))
    messages = service.requests[-1].prompt.messages
    assert [each["role"] for each in messages] == ["system", "user", "system", "assistant", "tool", "user"]
    assert "The lease ends in May." in messages[4]["content"]


def test_a_deferred_tool_is_offered_once_a_search_has_found_it(http: httpx.Client, service: ScriptedService) -> None:
    sent(http, recorded("claude_code_first"))
    assert "ToolSearch" in prompt(service) and "DeferredToolPlaceholder" not in prompt(service)
    sent(http, recorded("claude_code_after_tools"))
    for name in ("WebFetch", "NotebookEdit"):
        assert f'"name": "{name}"' in prompt(service)
    assert "DeferredToolPlaceholder" not in prompt(service)


def test_an_image_that_a_tool_has_read_is_refused_by_name(http: httpx.Client) -> None:
    request = copy.deepcopy(recorded("claude_code_after_tools"))
    request["body"]["messages"][-1]["content"][2]["content"] = [IMAGE]
    response = sent(http, request)
    assert response.status_code == 400 and "'image'" in response.json()["error"]["message"]


def test_no_recording_holds_anybodys_prose() -> None:
    """Whatever has words in a row is filler, or was said here."""
    ours = ("Words of the same", "Say hello.", "Hello there.", "Look around.", "When does the library open?", "echo hi")

    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for one in value.values() for text in texts(one)]
        if isinstance(value, list):
            return [text for one in value for text in texts(one)]
        return [value] if isinstance(value, str) else []

    for name in NAMES:
        for text in texts(recorded(name)["body"]):
            assert len(text.split()) < 4 or text.startswith(ours), (name, text)
