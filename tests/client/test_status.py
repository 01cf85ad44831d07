"""`paceline status` and what is shown of answers, whatever a server says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from typer.testing import Result

from client.dialogue import BINS, timeline_lines
from paceline.api.http.server import listen, url_of
from paceline.errors import PacelineError
from tests.api.scripted import ScriptedService, client_of, serving
from tests.client.test_conversation import invoked
from tests.stand_ins import Handler
from tests.stand_ins import serving as serving_with


def status(*arguments: str) -> Result:
    return invoked("status", *arguments)


def test_it_says_who_is_linked_what_runs_and_what_was_sent(url: str) -> None:
    shown = status("--url", url)
    assert shown.exit_code == 0
    assert "linked with laptop, round trip 20 ms; sent 150 bytes (draft 120, target 30)" in shown.stdout
    assert "answers under way 2; 3 steps and 50 rows so far" in shown.stdout
    assert "KV memory: 64 of 160 rows in use" in shown.stdout
    (row,) = json.loads(status("--url", url, "--json").stdout)
    assert row["links"][0]["sent"] == {"draft": 120, "target": 30} and row["url"] == url


def test_watched_it_is_shown_again_with_rates_until_interrupted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, None])

    def sleep(_: float) -> None:
        if next(looks, "ended") == "ended":
            raise KeyboardInterrupt

    monkeypatch.setattr("client.commands.time.sleep", sleep)
    shown = status("--url", url, "--watch")
    assert shown.exit_code == 0 and shown.stdout.count("linked with laptop") >= 3
    assert f"{url} now, a second: 0 steps, 0 rows, 0 bytes sent, 0 bytes received" in shown.stdout
    assert status("--url", url, "--watch", "--json").exit_code != 0


def test_readiness_needs_no_key() -> None:
    service = ScriptedService()
    with serving(service, {"right": None}) as url:
        shown = status("--ready", "--url", url)
        assert shown.exit_code == 0 and "ready" in shown.stdout
        service.is_ready = False
        assert status("--ready", "--url", url).exit_code == 1


def test_a_program_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client.commands.SILENCE_S", 0.2)
    with closing(listen("127.0.0.1", 0)) as listener:  # takes connections, and never reads
        result = status("--ready", "--url", url_of(listener))
    assert result.exit_code == 1 and "has said nothing for 0.2 s; is it overloaded?" in result.stderr


def test_where_nothing_answers_it_says_so_and_fails() -> None:
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    listener.close()
    result = status("--url", url)
    assert result.exit_code == 1 and "Nothing answers" in result.stderr
    (row,) = json.loads(status("--url", url, "--json").stdout)
    assert "Nothing answers" in row["error"]


def test_names_of_devices_need_a_key_where_there_are_keys() -> None:
    """With the scope `devices`, as `tests/api/test_openapi.py` checks of every route that has one."""
    with serving(ScriptedService(), {"right": None}) as url, client_of(url) as http:
        assert http.get("/v1/status").status_code == 401
        assert status("--url", url, "--key", "right").exit_code == 0
        assert "--key" in status("--url", url).stderr


# ---- the timeline of an answer as text ------------------------------------------------------------------------------
MOMENTS = [
    {"ms": 0, "side": "device", "kind": "search", "number": 2, "took_ms": 5},
    {"ms": 5, "side": "device", "kind": "strategy", "of": "aggregate", "number": 1},
    {"ms": 5, "side": "device", "kind": "cost_ms", "of": "aggregate", "number": 12.34},
    {"ms": 5, "side": "device", "kind": "cost_ms", "of": "draft_verify", "number": 0},
    {"ms": 6, "side": "device", "kind": "sent", "of": "open", "number": 245},
    {"ms": 8, "side": "cloud", "kind": "received", "of": "drafts", "number": 50},
    {"ms": 8, "side": "device", "kind": "round_trips", "number": 2, "took_ms": 30},
    {"ms": 20, "side": "device", "kind": "tokens", "number": 1},
    {"ms": 40, "side": "cloud", "kind": "lost", "number": 1},
    {"ms": 120, "side": "cloud", "kind": "tokens", "number": 4},
    {"ms": 120, "side": "cloud", "kind": "drafted", "number": 4},
    {"ms": 120, "side": "cloud", "kind": "accepted", "number": 3},
]
REPORT = {"strategy": "aggregate", "why": "both", "energy": {"device": {"joules": 1.5}}, "timeline": MOMENTS}


def test_sums_and_courses_are_told() -> None:
    *told, axis = timeline_lines(REPORT)
    assert told[:11] == [
        "aggregate: both",
        "compared, ms a token: aggregate 12.3, draft_verify (to be measured)",
        "device: 2 passages found in 5 ms",
        "tokens: 5 (device 1, cloud 4), the first after 20 ms, 40 a second",
        "drafts of the cloud: 3 of 4 accepted (75 %), 1 rolled back",
        "round trips: 2, 15 ms each",
        "bytes up from the device: 245 (open 245)",
        "bytes down from the cloud: 50 (drafts 50)",
        "40 ms: the cloud was lost",
        "energy of the device: 1.5 J",
        "device tokens   " + (" " * 9 + "█").ljust(BINS),
    ]
    assert [line.split()[1] for line in told[10:]] == ["tokens", "tokens", "drafted", "sent", "received"]
    assert axis.endswith("120 ms")


@pytest.mark.parametrize(
    "found",
    [None, "x", {}, [1, None, "x"], [{"ms": "x"}], [{"ms": float("nan")}, {"ms": -1}, {"kind": 5, "ms": 1, "of": []}]],
)
def test_a_timeline_of_any_shape_is_taken(found: object) -> None:
    assert next(timeline_lines({"timeline": found, "energy": [found]})) == "None: None"
    assert all(isinstance(line, str) for line in timeline_lines({"timeline": found, "energy": {"x": found}}))


# ---- `paceline chat` and `paceline status` at a server that means harm ----------------------------------------------
CLEAR = "\x1b[2J\x9b31m\x07"


@contextmanager
def answering(status: object, events: list[str]) -> Iterator[str]:
    """The URL of a server that gives this status, and these events to each question."""

    class Scripted(Handler):
        def get(self) -> None:
            told = {"data": [{"id": f"m{CLEAR}"}]} if "models" in self.path else status
            self.answer(json.dumps(told).encode(), "text/json")

        def post(self, _: bytes) -> None:
            self.answer("".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")

    with serving_with(Scripted) as url:
        yield url


def shown(*arguments: str) -> str:
    """What a command has written, to either output."""
    done = invoked(*arguments)
    written = done.output
    assert done.exception is None or isinstance(done.exception, SystemExit | PacelineError), done.exception
    assert not any(char in written for char in "\x1b\x9b\x07"), "nothing that controls a terminal"
    return written


@pytest.mark.parametrize(
    "status",
    [
        {"side": f"cloud{CLEAR}\nforged", "links": ["x", None]},
        {"links": [{"peer": "laptop\nforged", "rtt_s": "slow", "sent": {"draft": "many"}}]},
        {"links": [{"peer": ["x"], "rtt_s": None, "sent": [1]}], "load": {"kv_rows": 5, "kv_free_rows": "x"}},
        ["no object"],
    ],
)
def test_a_status_of_any_shape_is_shown_on_lines_of_its_own(status: object) -> None:
    with answering(status, []) as url:
        assert not any(line.startswith("forged") for line in shown("status", "--url", url).splitlines())


@pytest.mark.parametrize(
    "report",
    [
        {"citations": ["x", None]},
        {"citations": [{"side": ["x"], "document": "a.md (cloud)\n[2] official.md"}], "degraded": "x\n[2] forged"},
        {"citations": {"a": 1}, "degraded": ["x"]},
    ],
)
def test_sources_of_any_shape_are_shown_one_a_line(report: object) -> None:
    said = json.dumps({"choices": [{"delta": {"content": f"hello{CLEAR}"}}]})
    ended = json.dumps({"choices": [{"delta": "x", "finish_reason": "stop"}], "paceline": report})
    with answering({}, [said, '{"choices": ["x"]}', "[" * 100_000, ended, "[DONE]"]) as url:
        written = shown("chat", "--url", url, "Hello?")
    assert written.startswith("hello") and not any(line.startswith("[2]") for line in written.splitlines())
