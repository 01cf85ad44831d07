"""Counts, logs and traces of requests for text.

Times are seen where an answer leaves the runtime, so that a client that reads slowly is no slow server.
"""

from __future__ import annotations

import collections
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from paceline.runtime.service import GenerateEvent, GenerationResult
from paceline.runtime.tracing import PREFIX, Tracer

Outcome = Literal["stop", "length", "failed", "left"]
"""How an answer ended: as the client was told, by a failure, or because the client left."""

FIRST_TEXT_BOUNDS: Final = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)  # s
GAP_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)  # s
ANSWER_BOUNDS: Final = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # s

WEB: Final = "sent_web_"  # begins the stats of bytes that a workflow has sent to the web

_log = logging.getLogger("paceline.answers")
disable_created_metrics()  # type: ignore[no-untyped-call]  # every count began with the process


class AnswerCounts:
    """Since the start of the process. Labels are of small, fixed sets: none says who asked for what."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_{name}", text, labels, registry=self.registry)

        def times(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"paceline_{name}_seconds", text, buckets=bounds, registry=self.registry)

        self.answers = count("finished_answers", "Answers that have ended, by strategy and how", "strategy", "outcome")
        self.tokens = count("tokens", "Tokens of answers, by the side whose documents decided them", "strategy", "lane")
        self.chosen = count("chosen_answers", "Answers whose strategy was chosen by auto", "strategy")
        self.degraded = count("degraded_answers", "Answers that had to do with less", "why")
        self.drafted = count("drafted_tokens", "Tokens that were drafted and verified", "strategy")
        self.accepted = count("accepted_tokens", "Tokens of drafts that were accepted", "strategy")
        self.joules = count("joules", "Joules of answers at this side, by what took them", "of")
        self.handoffs = count("handoffs", "Answers that a device has begun by itself, by who ended them", "decided")
        self.saved = count("saved_cloud_tokens", "Tokens of them that the device has written in the cloud's place")
        self.risk = count("handoff_risk", "Sum over them of the chance that what the device has written is worse")
        self.web = count("web_sent_bytes", "Bytes that answers have sent to the web, by kind", "kind")
        self.writing = count("writing_seconds", "From the first text to the last, by strategy", "strategy")
        self.written = count("written_tokens", "Tokens after the first text", "strategy")
        self.prompt_tokens = count("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = count("cached_prompt_tokens", "Of them, those not computed")
        self.first_text = times("first_text", "From the request to the first text", FIRST_TEXT_BOUNDS)
        self.gaps = times("token_gap", "From one token to the next", GAP_BOUNDS)
        self.seconds = times("answer", "From the request to the end of its answer", ANSWER_BOUNDS)


class Observer:
    """Belongs to the loop of the server."""

    def __init__(self, model: Callable[[], str], tracer: Tracer | None = None) -> None:
        """model: name of the default, which answers requests that name none."""
        self.model = model
        self.counts = AnswerCounts()
        self.tracer = tracer

    def answer(self, state: dict[str, Any]) -> AnswerWatch:
        """Watch one answer, of which `n` choices are several. state: of its ASGI scope."""
        return AnswerWatch(self, state)


class AnswerWatch:
    """Receives every event of one answer, then its end."""

    def __init__(self, observer: Observer, state: dict[str, Any]) -> None:
        identity = state.get("identity")
        self._counts, self._tracer = observer.counts, observer.tracer
        self._model = state.get("model") or observer.model()
        self._auto = bool(state.get("auto"))
        self._request = str(state.get("request_id", ""))
        self._key = getattr(identity, "name", "") or getattr(identity, "key", "")  # for the log
        self._began = state.get("began", time.monotonic())  # when the request arrived, s
        self._first: float | None = None  # when the first text came
        self._last: float | None = None
        self._after_first = 0  # tokens after the first text
        self._lanes = collections.Counter[str]()
        self._ended = False

    def took(self, event: GenerateEvent) -> None:
        if isinstance(event, GenerationResult):
            self._end("stop" if event.reason == "stop" else "length" if event.reason == "length" else "failed", event)
            return
        if not event.tokens:
            return  # a step of a workflow, or the rest of a character
        now = time.monotonic()
        self._lanes[event.lane or "none"] += event.tokens
        if self._first is None or self._last is None:
            self._first = now
            self._counts.first_text.observe(now - self._began)
        else:
            self._after_first += event.tokens
            for _ in range(event.tokens):  # that come together share their gap
                self._counts.gaps.observe((now - self._last) / event.tokens)
        self._last = now

    def ended(self, outcome: Literal["failed", "left"]) -> None:
        """left: the client has gone, or cancelled. Without effect after the end."""
        self._end(outcome, None)

    def _end(self, outcome: Outcome, result: GenerationResult | None) -> None:
        if self._ended:
            return
        self._ended = True
        counts, now = self._counts, time.monotonic()
        strategy = "" if result is None else result.strategy
        counts.answers.labels(strategy, outcome).inc()
        for lane, tokens in self._lanes.items():
            counts.tokens.labels(strategy, lane).inc(tokens)
        fields: dict[str, str | int | float] = {
            "model": self._model,
            "outcome": outcome,
            "seconds": round(now - self._began, 4),
        }
        if self._first is not None:
            fields["first_text_s"] = round(self._first - self._began, 4)
        fields["completion_tokens"] = self._lanes.total()
        if result is not None:
            counts.seconds.observe(now - self._began)
            fields |= self._result(result)
        fields |= {f"{lane}_tokens": count for lane, count in sorted(self._lanes.items()) if lane != "none"}
        if self._key:
            fields["key"] = self._key
        told = ", ".join(f"{name} {value}" for name, value in fields.items())
        _log.info("answer %s: %s", self._request, told, extra={"id": self._request, "fields": fields})
        if self._tracer is not None:
            self._tracer.record("answer", self._request, now - self._began, fields)

    def _result(self, result: GenerationResult) -> dict[str, str | int | float]:
        counts, strategy = self._counts, result.strategy
        cached = int(result.stats.get("cached_tokens", 0))
        if self._auto:
            counts.chosen.labels(strategy).inc()
        counts.prompt_tokens.inc(result.prompt_tokens)
        counts.cached_tokens.inc(cached)
        for use in result.energy.values():
            counts.joules.labels("computing").inc(max(0.0, use.computed.joules))
            counts.joules.labels("sending").inc(max(0.0, use.sent.joules))
        for name, size in result.stats.items():
            if name.startswith(WEB):
                counts.web.labels(name.removeprefix(WEB).removesuffix("_bytes")).inc(size)
        if self._first is not None and self._last is not None:
            counts.writing.labels(strategy).inc(self._last - self._first)
            counts.written.labels(strategy).inc(self._after_first)
        counts.drafted.labels(strategy).inc(int(result.stats.get("drafted", 0)))
        counts.accepted.labels(strategy).inc(int(result.stats.get("accepted", 0)))
        if (handoff := result.handoff) is not None:
            counts.handoffs.labels(handoff.decided).inc()
            counts.saved.inc(handoff.saved_cloud_tokens)
            counts.risk.inc(handoff.risk)
        told: dict[str, str | int | float] = {
            "completion_tokens": result.completion_tokens,
            "prompt_tokens": result.prompt_tokens,
            "cached_tokens": cached,
            "strategy": strategy,
        }
        if result.policy is not None and result.policy.rule:
            told |= {"level": result.policy.level, "rule": result.policy.rule.partition(":")[0]}
        if result.degraded:
            counts.degraded.labels(result.degraded).inc()
            told["degraded"] = result.degraded
        return told


# Random, 16 bytes as hexadecimal digits after `req_`: also the trace id of OpenTelemetry.
request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""The id of the request that a task is about, for its log lines and traces; empty outside of one."""


def new_request_id() -> str:
    return PREFIX + secrets.token_hex(16)
