"""State of this side: `/metrics`, `/v1/status`, `/version`, `/healthz`, `/readyz` and `/health`.

`/metrics` has what it has done so far, in the text format of Prometheus. `/v1/status`, for `paceline status`, names
devices, so that a key needs the scope `devices`, or all. No question, answer or document is in any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline import __version__
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.body import answer
from paceline.api.http.routing import AdmissionDep, OpenRoute, ServiceDep
from paceline.api.observation import AnswerCounts
from paceline.api.openapi import REFUSALS, keyed_router
from paceline.errors import StorageError
from paceline.runtime.service import LinkStatus, Service

router = keyed_router("service")
devices = keyed_router("devices", "devices")
probes = APIRouter(route_class=OpenRoute, responses=REFUSALS, tags=["service"])


class Version(BaseModel):
    version: str


@router.get("/version")
async def version() -> Version:
    """Name the release of this program."""
    return Version(version=__version__)


@probes.get("/healthz")
async def health() -> dict[str, str]:
    """Say that the process lives."""
    return {"status": "ok"}


@probes.get("/readyz")
@probes.get("/health")
async def ready(service: ServiceDep, admission: AdmissionDep) -> Response:
    """Say whether it can be asked. `/health` is where vLLM and llama.cpp say so."""
    readiness = service.readiness()
    ready, told = readiness.ready and not admission.leaving, {"side": service.side, **readiness.detail}
    try:
        await admission.keyring.now()
    except StorageError:  # every request fails by it, and has the log say why
        ready, told["keys"] = False, "its keys cannot be read; its log says why"
    return answer({"ready": ready, **told}, 200 if ready else 503)


@devices.get("/v1/status")
async def status(service: ServiceDep, admission: AdmissionDep) -> dict[str, object]:
    """Say who is linked, what runs, and how many bytes of which kind were sent."""
    readiness = service.readiness()
    return {
        "version": __version__,
        "side": service.side,
        "ready": readiness.ready and not admission.leaving,
        "model": readiness.detail.get("model"),
        "documents": readiness.detail.get("documents"),
        "keys_required": (await admission.keyring.now()).required,
        "requests": admission.active,
        "load": asdict(service.load()),
        "links": [asdict(link) for link in service.links()],
    }


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
        load, refused = self._service.load(), sorted(self._admission.refused.items())
        documents = self._service.readiness().detail.get("documents")
        yield from self._counts.registry.collect()
        for name, text, count in (
            ("engine_steps", "Forward passes of the engine", load.steps),
            ("engine_rows", "Rows computed in them", load.rows),
            ("engine_cached_rows", "Rows of prompts that were cached or stored instead of computed", load.cached_rows),
            ("engine_preemptions", "Answers whose rows were released, to be computed again", load.preemptions),
            ("link_sent_bytes", "Bytes of frames sent on all links", load.sent_bytes),
            ("link_received_bytes", "Likewise received", load.received_bytes),
        ):
            yield CounterMetricFamily(f"paceline_{name}", text, count)
        for name, text, now in (
            ("documents", "Documents that this side can search", documents if isinstance(documents, int) else None),
            ("answers", "Answers under way whose client is here", load.answers),
            ("waiting_answers", "Answers that wait for memory", load.waiting),
            ("kv_rows", "Rows that the KV memory holds", load.kv_rows),
            ("kv_free_rows", "Rows of it that no answer uses, cached ones included", load.kv_free_rows),
            ("requests", "Requests under way", self._admission.active),
            ("links", "Links with other sides that are up", load.links),
            ("link_rtt_seconds", "Round trip of the slowest of them", load.rtt_s),
        ):
            if now is not None:
                yield GaugeMetricFamily(f"paceline_{name}", text, now)
        side = [((self._service.side, __version__), 1)]
        yield _gauge("info", "1, of this side and its version", side, "side", "version")
        refusals = CounterMetricFamily(
            "paceline_refused_requests", "Requests refused, by HTTP status", labels=["status"]
        )
        for status, number in refused:
            refusals.add_metric([str(status)], number)
        yield refusals
        yield _gauge(
            "sent_today_bytes",
            "Bytes of messages to other sides since midnight or the start, by hour and kind",
            [((hour, kind), size) for hour, kinds in load.sent_today.items() for kind, size in kinds.items()],
            "hour",
            "kind",
        )
        yield from _peers(self._peers)


def _gauge(name: str, text: str, values: Iterable[tuple[Sequence[str], float | None]], *labels: str) -> Metric:
    """values: each behind the values of the labels."""
    family = GaugeMetricFamily(f"paceline_{name}", text, labels=labels)
    for of, value in sorted(values):
        if value is not None:
            family.add_metric(of, value)
    return family


def _peers(links: Sequence[LinkStatus]) -> Iterator[Metric]:
    """Gauges of each link that is up, counted since it came up."""
    for name, text, field in (
        ("protocol", "Version of the link's protocol", "protocol"),
        ("rtt_seconds", "Round trip with this peer", "rtt_s"),
        ("bandwidth_bytes", "Bytes a second towards it, where that has been the limit", "bandwidth"),
        ("asked", "Answers, searches and texts that it was asked to take part in", "asked"),
        ("asks", "Likewise that it has asked for here", "asks"),
        ("received_bytes", "Bytes of its frames", "received"),
    ):
        yield _gauge(f"peer_{name}", text, [((link.peer,), getattr(link, field)) for link in links], "peer")
    sent = [((link.peer, kind), size) for link in links for kind, size in link.sent.items()]
    yield _gauge("peer_sent_bytes", "Bytes of messages to it, by kind", sent, "peer", "kind")
