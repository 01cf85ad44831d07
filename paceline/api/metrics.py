"""`/metrics`: what this side has done so far, in the text format of Prometheus.

Labels are strategies, lanes and ends of answers, of which there are a few each: none says who asked for what.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline.api.http.routing import ServiceDep
from paceline.api.observation import AnswerCounts, Histogram
from paceline.api.openapi import keyed_router
from paceline.runtime.service import Load

router = keyed_router("service")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request, service: ServiceDep) -> Response:
    """Count answers, tokens, steps, links and memory, in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Now(service.load(), request.app.state.observer.counts))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Now(Collector):
    """Numbers of this moment."""

    def __init__(self, load: Load, counts: AnswerCounts) -> None:
        self._load = load
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield from _answers(self._counts)
        yield from _engine(self._load)
        yield from _links(self._load)


def _answers(counts: AnswerCounts) -> Iterator[Metric]:
    answers = CounterMetricFamily(
        "paceline_finished_answers", "Answers that have ended, by strategy and how", labels=("strategy", "outcome")
    )
    for (strategy, outcome), count in sorted(counts.answers.items()):
        answers.add_metric((strategy, outcome), count)
    tokens = CounterMetricFamily(
        "paceline_tokens", "Tokens of answers, by the side whose documents decided them", labels=("strategy", "lane")
    )
    for (strategy, lane), count in sorted(counts.tokens.items()):
        tokens.add_metric((strategy, lane), count)
    degraded = CounterMetricFamily("paceline_degraded_answers", "Answers that had to do with less", labels=("why",))
    for why, count in sorted(counts.degraded.items()):
        degraded.add_metric((why,), count)
    yield from (answers, tokens, degraded)
    for name, text, drafts in (
        ("drafted", "Tokens that were drafted and verified", counts.drafted),
        ("accepted", "Tokens of drafts that were accepted", counts.accepted),
    ):
        family = CounterMetricFamily(f"paceline_{name}_tokens", text, labels=("strategy",))
        for strategy, count in sorted(drafts.items()):
            family.add_metric((strategy,), count)
        yield family
    yield CounterMetricFamily("paceline_prompt_tokens", "Tokens of prompts", counts.prompt_tokens)
    yield CounterMetricFamily("paceline_cached_prompt_tokens", "Of them, those not computed", counts.cached_tokens)
    yield _histogram("first_text", "From the request to the first text", counts.first_text)
    yield _histogram("token_gap", "From one token to the next", counts.gaps)
    yield _histogram("answer", "From the request to the end of its answer", counts.seconds)


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    """In seconds."""
    buckets = [(_bound(bound), float(count)) for bound, count in values.cumulative()]
    return HistogramMetricFamily(f"paceline_{name}_seconds", text, buckets=buckets, sum_value=values.sum)


def _bound(bound: float) -> str:
    return "+Inf" if isinf(bound) else str(float(bound))


def _engine(load: Load) -> Iterator[Metric]:
    for name, text, count in (
        ("steps", "Forward passes of the engine", load.steps),
        ("rows", "Rows computed in them", load.rows),
        ("cached_rows", "Rows of prompts that were cached or stored instead of computed", load.cached_rows),
        ("preemptions", "Answers whose rows were released for others, to be computed again", load.preemptions),
    ):
        yield CounterMetricFamily(f"paceline_engine_{name}", text, count)
    yield GaugeMetricFamily("paceline_answers", "Answers under way whose client is here", load.answers)
    yield GaugeMetricFamily("paceline_waiting_answers", "Answers that wait for memory", load.waiting)
    if load.kv_rows is not None and load.kv_free_rows is not None:
        yield GaugeMetricFamily("paceline_kv_rows", "Rows that the KV memory holds", load.kv_rows)
        yield GaugeMetricFamily(
            "paceline_kv_free_rows", "Rows of it that no answer uses, cached ones included", load.kv_free_rows
        )


def _links(load: Load) -> Iterator[Metric]:
    yield GaugeMetricFamily("paceline_links", "Links with other sides that are up", load.links)
    if load.rtt_s is not None:
        yield GaugeMetricFamily("paceline_link_rtt_seconds", "Round trip of the slowest of them", load.rtt_s)
    yield CounterMetricFamily("paceline_link_sent_bytes", "Bytes of frames sent on all links", load.sent_bytes)
    yield CounterMetricFamily("paceline_link_received_bytes", "Likewise received", load.received_bytes)
