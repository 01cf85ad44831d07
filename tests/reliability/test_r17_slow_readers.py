"""R17: clients that ask for long streams and do not read them. Little is kept for each, others are as fast, and what
was not read can be read later from the log of responses."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import NO_END, WAIT, RealServer, calm_p95

LONG = {"model": "fake", "input": "Hi", "stream": True, "background": True}


def post(path: str, body: dict[str, object], key: str) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-length: {len(content)}"
    return f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + content


def unread(server: RealServer, stack: ExitStack, request: bytes) -> socket.socket:
    """A connection that has asked and takes as little as a socket can."""
    each = stack.enter_context(socket.socket())
    each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's least, some 2 KiB
    each.settimeout(WAIT)
    each.connect(server.address)
    each.sendall(request)
    return each


def test_slow_readers_cost_little_and_nobody_else(hall: RealServer, size: Size, figure: Figure) -> None:
    number = size(10, 100)
    calm = calm_p95(hall)
    body = {"model": "fake", "stream": True, "max_tokens": size(200, 600), **NO_END}
    body["messages"] = [{"role": "user", "content": "Hi"}]
    with ExitStack() as stack:
        files = hall.process.num_fds()
        request = post("/v1/chat/completions", body, "bert")
        first = [unread(hall, stack, request) for _ in range(5)]  # memory that the program takes once
        assert all(each.recv(9, socket.MSG_WAITALL) == b"HTTP/1.1 " for each in first)
        before = hall.rss()
        readers = [unread(hall, stack, request) for _ in range(number)]
        assert all(each.recv(9, socket.MSG_WAITALL) == b"HTTP/1.1 " for each in readers)
        with hall.client("bert") as http, http.stream("POST", "/v1/chat/completions", json=body) as whole:
            assert list(whole.iter_lines())[-2] == "data: [DONE]"  # as long an answer, read: theirs are written, too
        written = time.monotonic()
        beside = calm_p95(hall)
        grown = hall.rss() - before
        if size(0, 1):
            deadline = time.monotonic() + WAIT
            while hall.process.num_fds() > files + 2:  # nothing is read, so that only the server sees them end
                assert time.monotonic() < deadline, f"{hall.process.num_fds()} descriptors are open still"
                time.sleep(0.5)
            figure("not read on: the last one ended after", time.monotonic() - written, at_most=65, unit="s")
    hall.check()
    figure("memory of each", grown / number / 1024, at_most=256, unit="KiB")
    figure("p95 gap of others", beside / calm, at_most=1.2, unit="x calm")


def test_what_a_slow_reader_missed_is_read_later(hall: RealServer) -> None:
    body = LONG | {"max_output_tokens": 300, "temperature": 0.0}
    with ExitStack() as stack, hall.client("bert") as http:
        slow = unread(hall, stack, post("/v1/responses", body, "bert"))
        head = b""
        while b"resp_" not in head or b'"sequence_number":1' not in head.replace(b" ", b""):
            head += slow.recv(512)
        slow.close()
        response = "resp_" + head.split(b"resp_", 1)[1].split(b'"', 1)[0].decode()
        events = []
        query = {"stream": "true", "starting_after": "1"}
        with http.stream("GET", f"/v1/responses/{response}", params=query) as answer:
            assert answer.status_code == 200
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert [event["sequence_number"] for event in events] == list(range(2, 2 + len(events)))
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        whole = http.get(f"/v1/responses/{response}").json()
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert whole["output"][0]["content"][0]["text"].endswith(text) and text
