"""Requests for a device that is linked to another server, through two applications on one PostgreSQL."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from paceline.api.app import create_app
from paceline.api.http import admission
from paceline.api.http.auth import Keyring
from paceline.api.http.hop import AFFINITY, HEADER, JOINED, _conversation, chosen
from paceline.api.http.server import listen, url_of
from paceline.fleet import Fleet, OtherServer
from paceline.postgres import Postgres
from paceline.runtime.identity import PrivateKey
from paceline.runtime.service import TextDelta
from server.app import add_hops
from tests.api.scripted import Script, ScriptedService, Signal, answering, client_of, request, running
from tests.fleet.test_shared_stores import eventually

KEY = PrivateKey(bytes([1] * 32))
KEYS: dict[str, str | None] = {"of-phone": "phone", "any": None}
PHONE = {"authorization": "Bearer of-phone"}
M = {"model": "scripted"}
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": M | {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": M | {"prompt": [72, 105]},
    "/v1/responses": M | {"input": "Hi"},
    "/v1/messages": M | {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/api/chat": M | {"messages": [{"role": "user", "content": "Hi"}], "stream": False},
    "/api/generate": M | {"prompt": "Hi", "stream": False},
}


@dataclass
class Server:
    fleet: Fleet
    app: FastAPI
    url: str
    service: ScriptedService
    linked: set[str] = field(default_factory=set)

    def link(self, device: str) -> None:
        self.linked.add(device)
        self.fleet.linked(device)

    def has(self, device: str | None) -> bool:
        return device in self.linked if device else bool(self.linked)


@contextmanager
def server_of(url: str) -> Iterator[Server]:
    with closing(Postgres(url)) as postgres, ExitStack() as ended:
        listener = listen("127.0.0.1", 0)
        service = ScriptedService()
        fleet = postgres.join(url_of(listener))
        here = Server(fleet, create_app(service, keyring=Keyring(KEYS), state=postgres), url_of(listener), service)
        add_hops(here.app, fleet, KEY, here.has)
        ended.enter_context(running(here.app, listener=listener))
        yield here


@pytest.fixture
def both(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    monkeypatch.setattr(admission, "NOTICE_S", 0.0)  # no balancer looks
    with server_of(url) as a, server_of(url) as b:
        b.link("phone")
        eventually(lambda: a.fleet.where("phone") is not None)
        yield a, b


def test_all_answers_come_from_the_server_of_the_device(both: tuple[Server, Server]) -> None:
    a, b = both
    assert set(BODIES) == JOINED
    for path, body in BODIES.items():
        named = body | {"paceline": {"device": "phone"}}
        for given, key in ((body, "of-phone"), (named, "any")):
            answer = request("POST", a.url + path + "?x=%2F", headers={"authorization": f"Bearer {key}"}, json=given)
            assert answer.status_code == 200, answer.text
            assert "Hello there." in answer.text
            assert answer.headers[AFFINITY] == b.url.removeprefix("http://")
            assert answer.headers.get_list("x-request-id") != [] and len(answer.headers.get_list("x-request-id")) == 1
    assert (len(a.service.requests), len(b.service.requests)) == (0, 2 * len(BODIES))
    assert b.service.requests[-1].account.trace == answer.headers["x-request-id"], "one id on both"
    wrong = request("POST", a.url + "/v1/completions", headers={"authorization": "Bearer no"}, json={"prompt": "Hi"})
    assert wrong.status_code == 401


def test_a_passed_request_is_answered_where_it_arrives_and_a_forged_one_is_no_passed_one(
    both: tuple[Server, Server],
) -> None:
    a, b = both
    b.linked.clear()  # it has lost the link, and the database does not know yet
    a.fleet.linked("phone")
    eventually(lambda: b.fleet.where("phone") is not None)
    a.linked.clear()
    with closing(Postgres(b.fleet._postgres.url)) as postgres:  # a third one says that both have it
        postgres.join("http://127.0.0.1:9")
    answer = request("POST", a.url + "/v1/completions", headers=PHONE, json=BODIES["/v1/completions"])
    assert answer.status_code == 200, "linked nowhere else: it is answered here"
    forged = PHONE | {HEADER.decode(): f"{int(time.time())}.req_1.{'0' * 64}"}
    answer = request("POST", b.url + "/v1/completions", headers=forged, json=BODIES["/v1/completions"])
    assert answer.headers["x-request-id"] != "req_1"
    assert len(a.service.requests) == 2, "passed on once, and never back"


def test_a_stream_is_passed_on_as_it_comes_and_ends_with_its_client(both: tuple[Server, Server]) -> None:
    a, b = both
    more = Signal()
    b.service.script = script = Script([TextDelta("one", 1), more, *answering("two")])
    body = BODIES["/v1/chat/completions"] | {"stream": True}
    with client_of(a.url, "of-phone") as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert any("one" in line for line in lines), "before the rest is written"
            more.set()
            assert any("two" in line for line in lines) and "data: [DONE]" in lines
        b.service.script = script = Script([TextDelta("one", 1), Signal()])
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert any("one" in line for line in answer.iter_lines())
    assert script.ended.wait(), "the client has left"


def test_a_response_is_cancelled_and_deleted_at_any_server(both: tuple[Server, Server]) -> None:
    a, b = both
    any_key = {"authorization": "Bearer any"}
    given = BODIES["/v1/responses"] | {"background": True}
    for method, end, told in (("POST", "/cancel", {"status": "cancelled"}), ("DELETE", "", {"deleted": True})):
        b.service.script = script = Script([TextDelta("one", 1), Signal()])
        made = request("POST", b.url + "/v1/responses", headers=any_key, json=given).json()["id"]
        assert script.began.wait()
        eventually(lambda made=made: request("GET", f"{a.url}/v1/responses/{made}", headers=any_key).status_code == 200)  # type: ignore[misc]
        answer = request(method, f"{a.url}/v1/responses/{made}{end}", headers=any_key)
        assert answer.status_code == 200 and answer.json().items() >= told.items()
        assert script.ended.wait()


def test_conversations_have_a_server_and_most_keep_it() -> None:
    servers = ["a:1", "b:1", "c:1"]
    bodies: list[dict[str, object]] = [
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": str(n)}]} for n in range(300)
    ]
    placed = [chosen(servers, "key", _conversation(body)) for body in bodies]
    assert all(80 <= placed.count(server) <= 120 for server in servers)
    fewer = [chosen(servers[:2], "key", _conversation(body)) for body in bodies]
    assert all(new == old for new, old in zip(fewer, placed, strict=True) if old in servers[:2])
    longer = bodies[0] | {"messages": [*json.loads(json.dumps(bodies[0]["messages"])), {"role": "assistant"}]}
    assert _conversation(longer) == _conversation(bodies[0])


def test_a_stream_whose_server_is_lost_says_so_and_a_response_goes_on_from_the_log(both: tuple[Server, Server]) -> None:
    a, b = both
    told = {
        "/v1/chat/completions": "data: [DONE]",
        "/v1/messages": "event: error",
        "/api/chat": '{"error":"The server to which the device is linked was lost. Please try again."}',
    }
    for path, end in told.items():
        b.service.script = Script([TextDelta("one", 1), held := Signal()])
        with broken(a, b, path, BODIES[path] | {"stream": True}) as lines:
            assert end in lines
            assert "was lost" in "".join(lines)
        held.set()
    b.service.script = Script([TextDelta("one", 1), more := Signal(), *answering("two")])
    with broken(a, b, "/v1/responses", BODIES["/v1/responses"] | {"stream": True, "background": True}, more) as lines:
        numbers = [json.loads(line[6:])["sequence_number"] for line in lines if line.startswith("data: ")]
        assert numbers == list(range(len(numbers)))
        assert "event: response.completed" in lines


def test_a_server_that_hangs_is_waited_for_as_long_as_its_lease(both: tuple[Server, Server], url: str) -> None:
    """One that is stopped keeps its connections: before it has answered, and in the middle."""
    a, b = both
    b.service.script = Script([TextDelta("one", 1), held := Signal()])
    path, streamed = "/v1/chat/completions", {"stream": True}
    with client_of(a.url, "of-phone") as client, client.stream("POST", path, json=BODIES[path] | streamed) as answer:
        lines = answer.iter_lines()
        assert any("one" in line for line in lines)
        b.fleet.close()  # its lease ends, as if it stood still
        assert "was lost" in "".join(lines)
    held.set()
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(Postgres(url)) as postgres:
        mute = postgres.join(url_of(silent))
        mute.linked("phone")
        eventually(lambda: getattr(a.fleet.where("phone"), "id", "") == mute.id)
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(request, "POST", a.url + path, headers=PHONE, json=BODIES[path])
            with silent.accept()[0]:
                mute.close()
                answered = asked.result()
            assert (answered.status_code, answered.json()["error"]["code"]) == (503, "server_lost")


@contextmanager
def broken(a: Server, b: Server, path: str, body: dict[str, object], more: Signal | None = None) -> Iterator[list[str]]:
    """The lines of a stream whose hop is cut when text has come, by a proxy between the servers."""
    with cut_proxy(b.url) as (between, cut):
        whole = a.fleet.where
        a.fleet.where = lambda _: OtherServer("b", between)  # type: ignore[method-assign,assignment]
        try:
            with client_of(a.url, "of-phone") as client, client.stream("POST", path, json=body) as answer:
                lines = []
                for line in answer.iter_lines():
                    if "one" in line and not cut.is_set():
                        cut.set()
                        if more is not None:
                            more.set()
                    lines.append(line)
                yield lines
        finally:
            a.fleet.where = whole  # type: ignore[method-assign]


@contextmanager
def cut_proxy(url: str) -> Iterator[tuple[str, threading.Event]]:
    """Passes the bytes of one connection on, until the event is set."""
    cut, target = threading.Event(), urlsplit(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            here = listener.accept()[0]
            there = socket.create_connection((target.hostname or "", target.port or 0))

            def pump(source: socket.socket, sink: socket.socket) -> None:
                with suppress(OSError):
                    while piece := source.recv(65536):
                        sink.sendall(piece)

            pumps = [threading.Thread(target=pump, args=ends, daemon=True) for ends in ((here, there), (there, here))]
            for each in pumps:
                each.start()
            cut.wait()
            for end in (here, there):
                end.shutdown(socket.SHUT_RDWR)
            for each in pumps:
                each.join()
            for end in (here, there):
                end.close()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", cut
        finally:
            cut.set()
            serving.join()
