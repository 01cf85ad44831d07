"""`/metrics`: what this side has done so far, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline.api.http.routing import ServiceDep
from paceline.api.observation import AnswerCounts
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
    def __init__(self, load: Load, counts: AnswerCounts) -> None:
        self._load = load
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield from self._counts.registry.collect()
        yield from _engine(self._load)
        yield from _links(self._load)


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
