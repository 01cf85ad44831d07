"""Server-sent events as OpenAI's clients read them (WHATWG HTML, 9.2): no ids, event names in `/v1/responses` only.

A comment line is ignored by clients, and keeps proxies from closing a silent connection.
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
