"""Server-sent events as OpenAI's clients read them (WHATWG HTML, 9.2): no ids, event names in `/v1/responses` only.

A comment line is ignored by clients, and keeps proxies from closing a silent connection.

Not sse-starlette: its response added 12 us of a processor to each streamed token, 41 % to what this HTTP surface takes
and 7 % to all with the fake model (bench/LOG.md, 2026-11-24). Nor does it hold headers back until the first token, so
that an early failure can be a plain answer.
"""

from __future__ import annotations

from paceline.api.http.errors import encode_json

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # else nginx buffers the stream
}


def event(data: object) -> bytes:
    return b"data: " + encode_json(data) + b"\n\n"


def named(name: str, data: bytes) -> bytes:
    """`data`: JSON, on one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
