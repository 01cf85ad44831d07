"""One answer of two processes, as an operator follows it: logs, traces and metrics of both sides under one id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from paceline.strategies.base import SIDES
from tests.e2e.pair import QUESTION, running_pair
from tests.stand_ins import Handler, serving


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The URL of a collector of OpenTelemetry, and the spans it was sent, after the name of their service."""
    spans: list[tuple[str, Any]] = []

    class Collector(Handler):
        def post(self, body: bytes) -> None:
            for of_service in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = next(
                    item.value.string_value for item in of_service.resource.attributes if item.key == "service.name"
                )
                spans.extend((service, span) for scope in of_service.scope_spans for span in scope.spans)
            self.answer(b"", "application/x-protobuf")

    with serving(Collector) as url:
        yield url, spans


def test_an_answer_is_followed_through_both_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (url, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with running_pair(tmp_path, flags=("--log-format", "json")) as pair:
            client = pair.client("device")
            answer = client.chat.completions.with_raw_response.create(
                model="fake",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=12,
                extra_body={"paceline": {"strategy": "aggregate"}},
            )
            asked = answer.headers["x-request-id"]
            metrics = client.with_options(base_url=pair.url("device")).get("/metrics", cast_to=str)
            client.close()
        logs = {side: (tmp_path / f"{side}.log").read_text() for side in SIDES}  # whole, since both have ended
        assert {(service, span.name) for service, span in spans} == {
            ("paceline-device", "answer"),
            ("paceline-cloud", "part"),
        }
        assert {"req_" + span.trace_id.hex() for _, span in spans} == {asked}
        said = str([span.attributes for _, span in spans])
        assert "aggregate" in said and "landlord" not in said and "Velda" not in said
    for side in SIDES:
        lines = [json.loads(line) for line in logs[side].splitlines() if line.startswith("{")]
        of_answer = [line for line in lines if line.get("id") == asked]
        assert any(line.get("strategy") == "aggregate" for line in of_answer), (side, logs[side])
        assert any("bytes" in line["message"] for line in of_answer), "what was sent to the other side"
    assert 'paceline_finished_answers_total{outcome="length",strategy="aggregate"} 1.0' in metrics or (
        'paceline_finished_answers_total{outcome="stop",strategy="aggregate"} 1.0' in metrics
    )
    assert "paceline_links 1.0" in metrics
    assert float(metrics.split("\npaceline_link_sent_bytes_total ")[1].split("\n")[0]) > 0
