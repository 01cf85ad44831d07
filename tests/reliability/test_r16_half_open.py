"""R16: hundreds of connections that begin and never introduce themselves. Honest ones get in beside them."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

import httpx

from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import UPGRADE, WAIT, RealServer, ends, many_files, quantile, strangers

HALVES = {
    "silent": b"",
    "half a head": b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
    "half a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no hello on a WebSocket": UPGRADE,
    "half a body": b"POST /v1/devices/enrol HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
}


def test_half_open_handshakes_keep_nobody_out_and_are_dropped(hall: RealServer, size: Size, figure: Figure) -> None:
    number = size(100, 400)  # of each kind; more than the 512 of one address, so that the oldest are cut
    took: list[float] = []
    headers = {"authorization": "Bearer ann"}
    with many_files(), ExitStack() as stack:
        before = hall.rss()
        began = time.monotonic()
        waiting = [each for says in HALVES.values() for each in strangers(hall.url, stack, number, says)]
        last = time.monotonic()
        for _ in range(30):
            start = time.monotonic()
            with socket.create_connection(hall.address, WAIT):
                assert httpx.get(f"{hall.url}/v1/models", headers=headers, timeout=WAIT, trust_env=False).is_success
            took.append(time.monotonic() - start)
        grown = hall.rss() - before
        assert len(list(ends(waiting))) == len(waiting)
        dropped = time.monotonic() - last
    hall.check()
    figure("half-open connections", len(waiting))
    figure("honest connection and answer, p99", quantile(took, 0.99), at_most=1, unit="s")
    figure("the last one dropped after", dropped, at_most=5.5, unit="s")
    figure("all opened within", last - began, unit="s")
    figure("memory each", grown / len(waiting) / 1024, at_most=256, unit="KiB")
