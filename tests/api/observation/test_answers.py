"""Counts, times and lines of the log of answers, over a real server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.api.http.logs import OneObject
from paceline.api.observation import Observer, new_request_id
from paceline.errors import PacelineError
from paceline.runtime.service import GenerationResult, TextDelta
from tests.api.scripted import Script, ScriptedService, client_of, serving

ASKED = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def observer(clock: Clock) -> Observer:
    return Observer(lambda: "demo", now=clock)


def result(**fields: object) -> GenerationResult:
    return GenerationResult("stop", 10, 4, "aggregate", "both", **fields)  # type: ignore[arg-type]


def test_times_are_those_of_tokens_and_lanes_are_counted(clock: Clock, observer: Observer) -> None:
    watch = observer.answer({"request_id": new_request_id(), "began": 0.0})
    clock.now = 0.3
    watch.took(TextDelta("a", 1, "device"))
    clock.now = 0.9
    watch.took(TextDelta("bcd", 3, "cloud"))
    clock.now = 1.0
    watch.took(result(stats={"drafted": 5, "accepted": 2, "cached_tokens": 7}, degraded="cloud_lost"))
    watch.left()  # after the end: nothing more
    counts = observer.counts
    assert counts.tokens == {("aggregate", "device"): 1, ("aggregate", "cloud"): 3}
    assert counts.answers == {("aggregate", "stop"): 1} and counts.degraded == {"cloud_lost": 1}
    assert (counts.prompt_tokens, counts.cached_tokens) == (10, 7)
    assert (counts.drafted["aggregate"], counts.accepted["aggregate"]) == (5, 2)
    assert (counts.first_text.sum, counts.first_text.count) == (0.3, 1)
    assert (round(counts.gaps.sum, 9), counts.gaps.count) == (0.6, 3)  # tokens that come together share their gap
    assert (counts.seconds.sum, counts.seconds.count) == (1.0, 1)


def test_an_answer_that_fails_or_is_left_counts_as_such(observer: Observer) -> None:
    failing, leaving = observer.answer({}), observer.answer({})
    failing.took(TextDelta("a", 1))
    failing.failed()
    leaving.left()
    assert observer.counts.answers == {("", "failed"): 1, ("", "left"): 1}
    assert observer.counts.tokens == {("", "none"): 1} and observer.counts.seconds.count == 0


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


def test_an_answer_that_fails_is_counted(http: httpx.Client, service: ScriptedService) -> None:
    service.script = Script([PacelineError("no more")])  # type: ignore[list-item]
    assert http.post("/v1/chat/completions", json=ASKED).status_code >= 500
    assert samples(http)["paceline_finished_answers_total", "failed", ""] == 1


def test_a_line_of_json_cannot_be_forged() -> None:
    record = logging.LogRecord("paceline", logging.INFO, "", 0, "said %s", ('x"}\n{"level": "critical\u2028',), None)
    record.fields = {"message": "other", "peer": "a\nb"}  # type: ignore[attr-defined]
    line = OneObject().format(record)
    assert line.isprintable() and line.isascii()
    said = json.loads(line)
    assert said["message"].startswith("said") and said["peer"] == "a\nb" and said["level"] == "info"
