"""`/metrics`: what this side has done so far, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline import __version__
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.routing import AdmissionDep, ServiceDep
from paceline.api.observation import AnswerCounts
from paceline.api.openapi import keyed_router
from paceline.runtime.service import LinkStatus, Load, Service

router = keyed_router("service")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request, service: ServiceDep, admission: AdmissionDep) -> Response:
    """Count answers, tokens, steps, links and memory, in the text format of Prometheus. Of each device only for a key
    of the scope `devices`."""
    registry = CollectorRegistry()
    peers = service.links() if request.state.identity.may("devices") else ()
    registry.register(_Now(service, admission, request.app.state.observer.counts, peers))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Now(Collector):
    def __init__(
        self, service: Service, admission: AdmissionControl, counts: AnswerCounts, peers: Sequence[LinkStatus]
    ) -> None:
        self._service, self._admission, self._counts, self._peers = service, admission, counts, peers

    def collect(self) -> Iterator[Metric]:
        load = self._service.load()
        info = GaugeMetricFamily("paceline_info", "1, of this side and its version", labels=["side", "version"])
        info.add_metric([self._service.side, __version__], 1)
        yield info
        documents = self._service.readiness().detail.get("documents")
        if isinstance(documents, int):
            yield GaugeMetricFamily("paceline_documents", "Documents that this side can search", documents)
        yield from self._counts.registry.collect()
        yield from _engine(load)
        yield from _requests(self._admission)
        yield from _links(load)
        yield from _peers(self._peers)


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


def _requests(admission: AdmissionControl) -> Iterator[Metric]:
    yield GaugeMetricFamily("paceline_requests", "Requests under way", admission.active)
    refused = CounterMetricFamily("paceline_refused_requests", "Requests refused, by HTTP status", labels=["status"])
    for status, count in sorted(admission.refused.items()):
        refused.add_metric([str(status)], count)
    yield refused


def _links(load: Load) -> Iterator[Metric]:
    yield GaugeMetricFamily("paceline_links", "Links with other sides that are up", load.links)
    if load.rtt_s is not None:
        yield GaugeMetricFamily("paceline_link_rtt_seconds", "Round trip of the slowest of them", load.rtt_s)
    yield CounterMetricFamily("paceline_link_sent_bytes", "Bytes of frames sent on all links", load.sent_bytes)
    yield CounterMetricFamily("paceline_link_received_bytes", "Likewise received", load.received_bytes)
    today = GaugeMetricFamily(
        "paceline_sent_today_bytes",
        "Bytes of messages to other sides since midnight or the start, by hour and kind",
        labels=["hour", "kind"],
    )
    for hour, kinds in sorted(load.sent_today.items()):
        for kind, size in sorted(kinds.items()):
            today.add_metric([hour, kind], size)
    yield today


def _peers(links: Sequence[LinkStatus]) -> Iterator[Metric]:
    """Gauges of each link that is up, counted since it came up."""

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"paceline_peer_{name}", text, labels=["peer", *labels])

    protocol = gauge("protocol", "Version of the link's protocol")
    rtt = gauge("rtt_seconds", "Round trip with this peer")
    bandwidth = gauge("bandwidth_bytes", "Bytes a second towards it, where that has been the limit")
    asked = gauge("asked", "Answers, searches and texts that it was asked to take part in")
    asks = gauge("asks", "Likewise that it has asked for here")
    received = gauge("received_bytes", "Bytes of its frames")
    sent = gauge("sent_bytes", "Bytes of messages to it, by kind", "kind")
    for link in links:
        protocol.add_metric([link.peer], link.protocol)
        asked.add_metric([link.peer], link.asked)
        asks.add_metric([link.peer], link.asks)
        received.add_metric([link.peer], link.received)
        for kind, size in sorted(link.sent.items()):
            sent.add_metric([link.peer, kind], size)
        if link.rtt_s is not None:
            rtt.add_metric([link.peer], link.rtt_s)
        if link.bandwidth is not None:
            bandwidth.add_metric([link.peer], link.bandwidth)
    yield from (protocol, rtt, bandwidth, asked, asks, received, sent)
