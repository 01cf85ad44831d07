"""Parts of `paceline demo`: display and judgement of its answers. The whole command runs in tests/e2e."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from client import demo
from client.conversation import Conversation
from client.demo import DemoQuestion, Told, curl_line, faults, footer, load_questions
from client.dialogue import Screen
from paceline import models
from paceline.commands.demo import Child, free_port
from paceline.errors import ConfigError, PacelineError
from tests.stand_ins import Handler, serving

QUESTION = DemoQuestion("When?", ("nine",), ("cloud",))
BOTH = DemoQuestion("Who, and when?", ("Ada", "at nine"), ("cloud", "device"))
PIECES: list[tuple[str, str | None]] = [("It is A", "device"), ("da, at", "cloud"), (" nine", "cloud"), (".", None)]
CITED = [{"side": "cloud", "document": "museum.md"}, {"side": "device", "document": ""}]
RIGHT = Told(PIECES, {"citations": CITED, "strategy": "aggregate", "degraded": None})


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def screen(shown: io.StringIO) -> Screen:
    return Screen(Console(file=shown, width=200))


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """A program that has written a line and ended."""
    log = tmp_path / "cloud.log"
    log.write_text("out of memory\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return Child("cloud", process, log, f"http://127.0.0.1:{free_port(0)}")


def test_a_request_that_fails_is_a_fault_shown_with_the_programs_output(
    screen: Screen, shown: io.StringIO, child: Child
) -> None:
    assert demo.put(screen, child, QUESTION, check=True)
    assert "FAIL: Nothing answers at http://127.0.0.1" in shown.getvalue()
    assert "cloud | out of memory" in shown.getvalue()


@pytest.mark.parametrize(
    ("text", "check", "verdict"),
    [("at nine", True, "PASS"), ("at ten", True, "FAIL: 'nine' is not in the answer"), ("at ten", False, None)],
)
def test_an_answer_is_judged_only_if_asked_to(
    screen: Screen,
    shown: io.StringIO,
    child: Child,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    check: bool,
    verdict: str | None,
) -> None:
    def ask(self: Conversation, question: str) -> Iterator[tuple[str, str | None]]:  # noqa: ARG001  # as the method
        yield text, "cloud"
        self.answer.report = {"citations": CITED, "strategy": "aggregate"}

    monkeypatch.setattr(Conversation, "ask", ask)
    assert demo.put(screen, child, QUESTION, check=check) is (verdict is not None and verdict != "PASS")
    assert f"{text}\naggregate; decided: 1 by the cloud; cited: cloud: museum.md" in shown.getvalue()
    assert (verdict in shown.getvalue()) if verdict else "FAIL" not in shown.getvalue()


def test_the_state_is_removed_or_kept_as_asked(screen: Screen, shown: io.StringIO) -> None:
    with demo._state_directory(screen, keep=False) as gone:
        (gone / "file").write_text("x")
    assert not gone.exists()
    with pytest.raises(PacelineError), demo._state_directory(screen, keep=True) as kept:
        raise PacelineError("anything")
    assert kept.is_dir() and str(kept) in shown.getvalue()
    kept.rmdir()


def test_each_fault_is_named_and_a_right_answer_has_none() -> None:
    assert list(faults(BOTH, RIGHT)) == []
    cases: list[tuple[Told, str]] = [
        (Told([("It is Ada.", "device")], RIGHT.report), "'at nine' is not in the answer"),
        (Told(PIECES, {"citations": CITED[:1]}), "no document of the device is cited"),
        (Told([(text, "cloud") for text, _ in PIECES], RIGHT.report), "decided by documents of the device"),
        (Told([("Ada", "cloud")], RIGHT.report), "no token was decided by documents of the device"),
        (Told(PIECES, {**RIGHT.report, "degraded": "device_lost"}), "degraded: device_lost"),
    ]
    for told, fault in cases:
        assert any(fault in each for each in faults(BOTH, told))
    told = Told([("It is ", "device"), ("Ada", "cloud")], {"citations": CITED})
    (fault,) = faults(DemoQuestion("Who?", ("Ada",), ("device",)), told)
    assert fault == "'Ada' was decided by documents of the cloud", "the wrong side's"


def test_the_footer_says_who_decided_and_what_was_read_and_no_private_name() -> None:
    assert footer(RIGHT) == (
        "aggregate; decided: 2 by the cloud, 1 by the device; cited: cloud: museum.md; device: a private document"
    )
    assert footer(Told()) == "no report; decided: nothing; cited: nothing"


def test_the_curl_line_survives_the_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "demo", 'What\'s "it"?'))
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[-1])["messages"][0]["content"] == 'What\'s "it"?'


def test_the_samples_have_one_question_for_each_side_and_one_for_both(tmp_path: Path) -> None:
    questions = load_questions(models.SAMPLES / "questions.json")
    assert sorted(question.sides for question in questions) == [("cloud",), ("cloud", "device"), ("device",)]
    assert all(question.answers for question in questions)
    for text in ("", "[{}]", '{"question": 1}', "[1]"):
        (tmp_path / "questions.json").write_text(text)
        with pytest.raises(ConfigError, match="install paceline again"):
            load_questions(tmp_path / "questions.json")


class Slow(Handler):
    """A server that is at work for long before its first token, and says so; `ends`: not even that any more."""

    ends = False

    def get(self) -> None:
        self.answer(json.dumps({"object": "list", "data": [{"id": "demo"}]}).encode(), "application/json")

    def post(self, _: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for _ in range(4):
            time.sleep(0.3)
            self.wfile.write(b": ping\n\n")
            self.wfile.flush()
        if self.ends:
            self.rfile.read(1)  # until the client has gone
            return
        chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "at nine"}}]}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("ends", [False, True], ids=["an answer at last", "no answer"])
def test_a_slow_machine_is_waited_for_and_named_and_is_no_fault_of_an_answer(
    screen: Screen, shown: io.StringIO, child: Child, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(demo, "SILENCE_S", 1.0)  # less than the whole wait, more than between two signs of life
    monkeypatch.setattr(demo, "FIRST_TOKEN_S", 1.0)
    with serving(type("Slower", (Slow,), {"ends": ends})) as url:
        assert demo.put(screen, replace(child, url=url), QUESTION, check=False) is ends
    told = shown.getvalue()
    assert "FAIL" not in told
    if ends:
        assert "slow machine: http://127.0.0.1" in told and "has said nothing for 1 s" in told
    else:
        assert "at nine" in told and "slow machine: the first token came after" in told
