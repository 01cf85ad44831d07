"""Spans of OpenTelemetry, with the extra `paceline[otel]`, sent where the standard variables say.

The trace is the id of the request, on both sides, so that a device's answer and the cloud's part in it are one trace
without anything else being sent. Content is never part of a span.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

PREFIX: Final = "req_"  # of a request's id, before 32 hexadecimal digits
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
Fields = Mapping[str, str | int | float]


def tracer_of(side: str) -> Tracer | None:
    """The tracer that the environment asks for; None where it names no collector.

    Raises ConfigError where it does and the extra is not installed.
    """
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        names = " and ".join(name for name in ENDPOINTS if os.environ.get(name))
        raise ConfigError(f"{names} asks for traces: pip install 'paceline[otel]'") from error
    return Tracer(side, BatchSpanProcessor(OTLPSpanExporter()))


class Tracer:
    """Makes spans of what has ended. Its processor sends them on a thread of its own."""

    def __init__(self, side: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": f"paceline-{side}"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("paceline")

    def record(self, name: str, request: str, seconds: float, fields: Fields) -> None:
        """A piece of work on a request has ended that took so long. Without effect for an id that is not one of this
        program's: a peer may send any."""
        from opentelemetry import trace

        trace_id = _trace_id(request)
        if trace_id is None:
            return
        # No span of this id is ever sent: it joins those of both sides, of which none knows the other's.
        root = trace.SpanContext(
            trace_id, trace_id >> 64 or 1, is_remote=True, trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED)
        )
        ended = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(trace.NonRecordingSpan(root)),
            kind=trace.SpanKind.SERVER,
            attributes={f"paceline.{key}": value for key, value in fields.items()} | {"paceline.request": request},
            start_time=ended - int(seconds * 1e9),
        )
        span.end(ended)

    def close(self) -> None:
        """Send what has not been sent, for a few seconds at most."""
        self._provider.shutdown()


def _trace_id(request: str) -> int | None:
    digits = request.removeprefix(PREFIX)
    if len(digits) != 32 or not all(digit in "0123456789abcdef" for digit in digits):
        return None
    return int(digits, 16) or None
