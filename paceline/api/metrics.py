"""`/metrics`: what this side has done so far, in the text format of Prometheus.

Knows nothing of requests or keys: no value has a label, so that none says who asked for what.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.routes import Route
from paceline.runtime.service import Service


class Metrics(Collector):
    """The route, and the service whose numbers it reads when it is asked."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="GET",
                path="/metrics",
                endpoint=self.show,
                summary="Count steps, rows, preemptions and memory, in the text format of Prometheus.",
                scope=None,
                media_type="text/plain",
            ),
        )

    async def show(self, request: Request) -> Response:  # noqa: ARG002  # an endpoint's signature
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def collect(self) -> Iterator[Metric]:
        load = self._service.load()
        for name, text, count in (
            ("steps", "Forward passes of the engine", load.steps),
            ("rows", "Rows computed in them", load.rows),
            ("cached_rows", "Rows of prompts that were cached or stored instead of computed", load.cached_rows),
            ("preemptions", "Answers whose rows were released for others, to be computed again", load.preemptions),
        ):
            yield CounterMetricFamily(f"paceline_engine_{name}", text, count)
        yield GaugeMetricFamily("paceline_answers", "Answers under way whose client is here", load.answers)
        if load.kv_rows is not None and load.kv_free_rows is not None:
            yield GaugeMetricFamily("paceline_kv_rows", "Rows that the KV memory holds", load.kv_rows)
            yield GaugeMetricFamily(
                "paceline_kv_free_rows", "Rows of it that no answer uses, cached ones included", load.kv_free_rows
            )
