"""Counts, times and lines of the log of answers, over a real server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from hashlib import sha256

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.api import observation
from paceline.api.app import create_app
from paceline.api.http.auth import Keyring, StoredKey
from paceline.api.http.logs import OneObject
from paceline.api.observation import Observer, new_request_id
from paceline.core.energy import Energy, EnergyUse
from paceline.errors import PacelineError
from paceline.runtime.service import GenerationResult, Handoff, TextDelta
from tests.api.scripted import FreshKeys, Script, ScriptedService, client_of, running, serving
from tests.clocks import read_from

ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def observer() -> Observer:
    return Observer(lambda: "demo")


def result(**fields: object) -> GenerationResult:
    return GenerationResult("stop", 10, 4, "aggregate", "both", **fields)  # type: ignore[arg-type]


def counted(observer: Observer, name: str, **labels: str) -> float | None:
    return observer.counts.registry.get_sample_value(f"paceline_{name}", labels)


def test_times_are_those_of_tokens_and_lanes_are_counted(monkeypatch: pytest.MonkeyPatch, observer: Observer) -> None:
    now = 0.0
    read_from(monkeypatch, lambda: now, observation)
    watch = observer.answer({"request_id": new_request_id(), "began": 0.0})
    now = 0.3
    watch.took(TextDelta("a", 1, "device"))
    now = 0.9
    watch.took(TextDelta("bcd", 3, "cloud"))
    now = 1.0
    use = EnergyUse("power", Energy(3.0), Energy(0.5))
    stats = {"drafted": 5, "accepted": 2, "cached_tokens": 7, "sent_web_query_bytes": 11}
    handoff = Handoff("cloud", 12, 0.5, 0.25, 12, 0.125)
    watch.took(result(stats=stats, degraded="cloud_lost", energy={"device": use}, handoff=handoff))
    watch.ended("left")  # after the end: nothing more
    assert counted(observer, "tokens_total", strategy="aggregate", lane="device") == 1
    assert counted(observer, "tokens_total", strategy="aggregate", lane="cloud") == 3
    assert counted(observer, "finished_answers_total", strategy="aggregate", outcome="stop") == 1
    assert counted(observer, "degraded_answers_total", why="cloud_lost") == 1
    assert (counted(observer, "prompt_tokens_total"), counted(observer, "cached_prompt_tokens_total")) == (10, 7)
    assert counted(observer, "drafted_tokens_total", strategy="aggregate") == 5
    assert counted(observer, "accepted_tokens_total", strategy="aggregate") == 2
    assert counted(observer, "handoffs_total", decided="cloud") == 1
    assert (counted(observer, "saved_cloud_tokens_total"), counted(observer, "handoff_risk_total")) == (12, 0.125)
    joules = [counted(observer, "joules_total", of=each) for each in ("computing", "sending")]
    assert joules == [3, 0.5]
    assert counted(observer, "web_sent_bytes_total", kind="query") == 11
    assert counted(observer, "writing_seconds_total", strategy="aggregate") == pytest.approx(0.6)
    assert counted(observer, "written_tokens_total", strategy="aggregate") == 3
    for name, total, number in (("first_text", 0.3, 1), ("token_gap", 0.6, 3), ("answer", 1.0, 1)):
        assert counted(observer, f"{name}_seconds_sum") == pytest.approx(total)
        assert counted(observer, f"{name}_seconds_count") == number, "tokens that come together share their gap"


def test_an_answer_that_fails_or_is_left_counts_as_such(observer: Observer) -> None:
    failing, leaving = observer.answer({}), observer.answer({})
    failing.took(TextDelta("a", 1))
    failing.ended("failed")
    leaving.ended("left")
    assert counted(observer, "finished_answers_total", strategy="", outcome="failed") == 1
    assert counted(observer, "finished_answers_total", strategy="", outcome="left") == 1
    assert counted(observer, "tokens_total", strategy="", lane="none") == 1
    assert counted(observer, "answer_seconds_count") == 0


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def http(service: ScriptedService) -> Iterator[httpx.Client]:
    with serving(service) as url, client_of(url) as client:
        yield client


def samples(http: httpx.Client) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_of_every_endpoint_are_counted_and_logged_with_their_id(
    http: httpx.Client, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    body = ASKED if "chat" in path else {"model": "scripted", "input": "hi"}
    with caplog.at_level(logging.INFO, "paceline.answers"):
        answer = http.post(path, json={**body, "stream": stream})
        seen = samples(http)
    strategy = "aggregate"
    assert seen["paceline_finished_answers_total", "stop", strategy] == 1
    assert sum(value for name, value in seen.items() if name[0] == "paceline_tokens_total") > 0
    assert seen["paceline_first_text_seconds_bucket", "+Inf"] == seen["paceline_first_text_seconds_count",] == 1
    (line,) = [record for record in caplog.records if record.name == "paceline.answers"]
    said = json.loads(OneObject().format(line))
    assert said["id"] == answer.headers["x-request-id"] and said["id"] in line.getMessage()
    assert (said["model"], said["outcome"], said["strategy"]) == ("scripted", "stop", strategy)
    assert said["completion_tokens"] > 0 and said["seconds"] >= said["first_text_s"] >= 0


def test_devices_are_named_to_keys_that_may_see_them_and_refusals_are_counted() -> None:
    keys = [StoredKey.of(sha256(b"few").digest(), scopes=frozenset({"chat"})), StoredKey.of(sha256(b"all").digest())]
    with running(create_app(ScriptedService(), keyring=Keyring({}, FreshKeys(*keys)))) as url:
        for key, named in (("few", False), ("all", True)):
            with client_of(url, key) as http:
                seen = samples(http)
                assert (("paceline_peer_sent_bytes", "draft", "laptop") in seen) == named
                assert ("laptop" in http.get("/metrics").text) == named
                assert http.get("/v1/nothing").status_code == 404
    assert seen["paceline_refused_requests_total", "404"] == 1, "the second came later"
    assert seen["paceline_requests",] == 0


def test_a_line_of_json_cannot_be_forged() -> None:
    record = logging.LogRecord("paceline", logging.INFO, "", 0, "said %s", ('x"}\n{"level": "critical\u2028',), None)
    record.fields = {"message": "other", "peer": "a\nb"}  # type: ignore[attr-defined]
    line = OneObject().format(record)
    assert line.isprintable() and line.isascii()
    said = json.loads(line)
    assert said["message"].startswith("said") and said["peer"] == "a\nb" and said["level"] == "info"


def test_an_answer_that_fails_is_counted(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([PacelineError("no more")])
    assert http.post("/v1/chat/completions", json=ASKED).status_code >= 500
    assert samples(http)["paceline_finished_answers_total", "failed", ""] == 1
