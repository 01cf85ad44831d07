"""Questions of the demonstration: requests, display and judgement, against chunks as the API sends them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from paceline import models
from paceline.commands.demo import Answer, Question, ask, curl_line, faults, footer, load_questions
from paceline.errors import ConfigError

BOTH = Question("Who, and when?", ("Ada", "at nine"), ("cloud", "device"))
PIECES: list[tuple[str, str | None]] = [("It is A", "device"), ("da, at", "cloud"), (" nine", "cloud"), (".", None)]
RIGHT = Answer(PIECES, [("cloud", "museum.md"), ("device", "")], "aggregate")


def chunk(delta: dict[str, object], note: dict[str, object] | None = None) -> str:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "demo",
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }
    return f"data: {json.dumps(body | ({'paceline': note} if note else {}))}\n\n"


def served(requests: list[httpx2.Request], stream: str) -> OpenAI:
    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        if request.url.path == "/v1/models":
            entry = {"id": "demo", "object": "model", "created": 1, "owned_by": "paceline"}
            return httpx2.Response(200, json={"object": "list", "data": [entry]})
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=stream)

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    return OpenAI(base_url="http://test/v1", api_key="k", http_client=client)


def test_a_streamed_answer_is_shown_as_it_comes_and_gathered_with_its_lanes() -> None:
    end: dict[str, object] = {
        "strategy": "aggregate",
        "why": "both hold documents",
        "degraded": None,
        "citations": [{"side": "device", "document": "diary.md", "passage": "", "score": 0.5}],
        "stats": {},
    }
    stream = chunk({"role": "assistant", "content": ""}) + chunk({"content": "At "}, {"lane": None})
    stream += chunk({"content": "nine"}, {"lane": "device"}) + chunk({}, end) + "data: [DONE]\n\n"
    requests: list[httpx2.Request] = []
    shown: list[tuple[str, str | None]] = []
    answer = ask(served(requests, stream), "When?", lambda text, lane: shown.append((text, lane)))
    assert shown == answer.pieces == [("At ", None), ("nine", "device")]
    assert (answer.text, answer.strategy, answer.citations) == ("At nine", "aggregate", [("device", "diary.md")])
    sent = json.loads(requests[-1].content)
    assert (sent["model"], sent["stream"], sent["temperature"], sent["paceline"]) == ("demo", True, 0, {"report": True})


def test_a_right_answer_has_no_faults() -> None:
    assert list(faults(BOTH, RIGHT)) == []


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Answer([("It is Ada.", "device")], RIGHT.citations), "'at nine' is not in the answer"),
        (Answer(PIECES, [("cloud", "museum.md")]), "no document of the device is cited"),
        (Answer([(text, "cloud") for text, _ in PIECES], RIGHT.citations), "decided by documents of the device"),
        (Answer(PIECES, RIGHT.citations, "autoregressive", "device_lost"), "degraded: device_lost"),
    ],
)
def test_each_fault_is_named(answer: Answer, fault: str) -> None:
    assert any(fault in each for each in faults(BOTH, answer))


def test_an_answer_from_the_wrong_sides_documents_is_a_fault() -> None:
    question = Question("Who?", ("Ada",), ("device",))
    answer = Answer([("It is ", "device"), ("Ada", "cloud")], [("device", "diary.md")])
    assert list(faults(question, answer)) == ["'Ada' was decided by documents of the cloud"]


def test_lanes_of_a_part_are_those_of_the_pieces_that_hold_it() -> None:
    assert RIGHT.lanes_of("ada") == {"device", "cloud"}
    assert RIGHT.lanes_of("nine") == {"cloud"}
    assert RIGHT.lanes_of("nobody") == frozenset()


def test_the_footer_says_who_decided_and_what_was_read_and_no_private_name() -> None:
    assert footer(RIGHT) == (
        "aggregate; decided: 2 by the cloud, 1 by the device; cited: cloud: museum.md; device: a private document"
    )
    assert footer(Answer()) == "no report; decided: nothing; cited: nothing"


def test_the_curl_line_survives_the_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "demo", 'What\'s "it"?'))
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[-1])["messages"][0]["content"] == 'What\'s "it"?'


def test_the_samples_have_one_question_for_each_side_and_one_for_both() -> None:
    questions = load_questions(models.SAMPLES / "questions.json")
    assert sorted(question.sides for question in questions) == [("cloud",), ("cloud", "device"), ("device",)]
    assert all(question.answers for question in questions)


@pytest.mark.parametrize("text", ["", "[{}]", '{"question": 1}', "[1]"])
def test_samples_that_are_not_as_they_should_be_are_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "questions.json").write_text(text)
    with pytest.raises(ConfigError, match="install paceline again"):
        load_questions(tmp_path / "questions.json")
