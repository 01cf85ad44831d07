"""`paceline chat` and `paceline status` at a server that means harm: no traceback, no forged line, no escape."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from paceline.commands.main import build
from paceline.errors import PacelineError

CLEAR = "\x1b[2J\x9b31m\x07"


@contextmanager
def answering(status: object, events: list[str]) -> Iterator[str]:
    """The URL of a server that gives this status, and these events to each question."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": f"m{CLEAR}"}]} if "models" in self.path else status), "json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send("".join(f"data: {event}\n\n" for event in events), "event-stream")

        def _send(self, body: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"text/{kind}")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def shown(*arguments: str) -> str:
    """What a command has written, to either output."""
    done = CliRunner().invoke(build(), arguments)
    written = done.output
    assert done.exception is None or isinstance(done.exception, SystemExit | PacelineError), done.exception
    assert not any(char in written for char in "\x1b\x9b\x07"), "nothing that controls a terminal"
    return written


@pytest.mark.parametrize(
    "status",
    [
        {"side": f"cloud{CLEAR}\nforged", "links": ["x", None]},
        {"links": [{"peer": "laptop\nforged", "rtt_s": "slow", "sent": {"draft": "many"}}]},
        {"links": [{"peer": ["x"], "rtt_s": None, "sent": [1]}], "load": {"kv_rows": 5, "kv_free_rows": "x"}},
        ["no object"],
    ],
)
def test_a_status_of_any_shape_is_shown_on_lines_of_its_own(status: object) -> None:
    with answering(status, []) as url:
        assert not any(line.startswith("forged") for line in shown("status", "--url", url).splitlines())


@pytest.mark.parametrize(
    "report",
    [
        {"citations": ["x", None]},
        {"citations": [{"side": ["x"], "document": "a.md (cloud)\n[2] official.md"}], "degraded": "x\n[2] forged"},
        {"citations": {"a": 1}, "degraded": ["x"]},
    ],
)
def test_sources_of_any_shape_are_shown_one_a_line(report: object) -> None:
    said = json.dumps({"choices": [{"delta": {"content": f"hello{CLEAR}"}}]})
    ended = json.dumps({"choices": [{"delta": "x", "finish_reason": "stop"}], "paceline": report})
    with answering({}, [said, '{"choices": ["x"]}', "[" * 100_000, ended, "[DONE]"]) as url:
        written = shown("chat", "--url", url, "Hello?")
    assert written.startswith("hello") and not any(line.startswith("[2]") for line in written.splitlines())
