"""Strangers at the doors: counted by address and in all, the oldest cut; addresses behind proxies; seldom logs."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.api.app import create_app, include
from paceline.api.http import logs
from paceline.api.http.admission import (
    MAX_ACTIVE,
    MAX_OPEN_PER_ADDRESS,
    AdmissionControl,
    AdmissionMiddleware,
    DoorLimits,
    Doors,
    Visitor,
    client_address,
    networks,
)
from paceline.api.http.auth import Keyring
from paceline.api.http.body import Schema, within
from paceline.api.http.logs import PAUSE_S, Seldom, quieten
from paceline.api.http.routing import OpenRoute
from paceline.api.http.server import MAX_CONNECTIONS, MAX_FILES, connections_within
from paceline.errors import RequestError
from paceline.runtime.admission import MAX_ANSWERS
from tests.api.scripted import WAIT, ScriptedService, connected, running
from tests.clocks import read_from

FORWARDED = b"x-forwarded-for"
MOVES = ("enter", "known", "upgraded", "speak", "gone")


class Hall:
    """Doors, and the numbers of the visitors that were cut."""

    def __init__(self, per_address: int, max_connections: int, trusted: tuple[str, ...] = ()) -> None:
        self.doors = Doors(DoorLimits(per_address, networks(trusted)), max_connections)
        self.cut: list[int] = []
        self.visitors: list[Visitor] = []

    def enter(self, address: str) -> Visitor:
        number = len(self.visitors)
        self.visitors.append(Visitor(self.doors, address, lambda: self.cut.append(number)))
        self.visitors[-1].linger()
        self.check()
        return self.visitors[-1]

    def check(self) -> None:
        self.doors.shares.check()
        self.doors.strangers.check()
        assert all(not visitor.known and not visitor._gone for visitor in self.doors.strangers)


def test_the_oldest_stranger_of_an_address_is_cut_for_one_more() -> None:
    hall = Hall(2, 100)
    for address in ("1.1.1.1", "2.2.2.2", "1.1.1.1", "1.1.1.1", "1.1.1.1"):
        hall.enter(address)
    assert hall.cut == [0, 2] and len(hall.doors.strangers) == 3


def test_half_of_all_connections_may_be_strangers_and_a_crowd_makes_room_for_others() -> None:
    hall = Hall(100, 10)
    for address in ("2.2.2.2", *["1.1.1.1"] * 4, "3.3.3.3", "2.2.2.2"):
        hall.enter(address)
    assert hall.cut == [1, 2]


def test_a_sender_that_is_known_is_not_cut_and_counts_for_its_key() -> None:
    hall = Hall(1, 18)
    known = hall.enter("1.1.1.1")
    assert known.identify("a")
    hall.enter("1.1.1.1")
    hall.enter("1.1.1.1")
    assert hall.cut == [1] and hall.doors.shares.held("a") == 1
    others = [hall.enter("1.1.1.1") for _ in range(20)]
    assert [other.identify("a") for other in others].count(True) == 15, "of 18 a key has 16"
    assert others[-1].identify("b"), "another still gets in"
    assert known.identify("b") and hall.doors.shares.held("a") == 15, "a proxy's connection, used by both"
    for visitor in hall.visitors:
        visitor.gone()
    hall.check()
    assert hall.doors.shares.taken == 0 == len(hall.doors.strangers)


def test_a_websocket_introduces_itself_on_whatever_connection() -> None:
    hall = Hall(1, 10)
    visitor = hall.enter("1.1.1.1")
    assert visitor.identify("")
    visitor.upgraded()
    assert len(hall.doors.strangers) == 1
    visitor.admitted()
    assert len(hall.doors.strangers) == 0


def test_a_proxys_connections_count_for_the_addresses_behind_it() -> None:
    hall = Hall(1, 100, trusted=("10.0.0.0/8",))
    for _ in range(5):
        hall.enter("10.0.0.1")
    assert hall.cut == [], "it has not said for whom"
    for visitor, address in zip(hall.visitors, ("1.1.1.1", "2.2.2.2", "1.1.1.1"), strict=False):
        visitor.speak_for(address)
    hall.check()
    assert hall.cut == [0]


@given(
    st.integers(1, 4), st.integers(2, 12), st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 30)), max_size=80)
)
def test_the_counts_hold_whatever_happens(per_address: int, max_connections: int, moves: list[tuple[str, int]]) -> None:
    hall = Hall(per_address, max_connections, trusted=("9.9.9.9",))
    for move, number in moves:
        visitor = hall.visitors[number % len(hall.visitors)] if hall.visitors else None
        if move == "enter" or visitor is None:
            hall.enter(("1.1.1.1", "2.2.2.2", "9.9.9.9")[number % 3])
        elif move == "gone":
            visitor.gone()
        elif visitor._gone:
            continue
        elif move == "known":
            visitor.identify("ab"[number % 2])
        elif move == "upgraded":
            visitor.upgraded()
        else:
            visitor.speak_for(f"3.3.3.{number % 3}")
        hall.check()
        assert len(hall.doors.strangers) <= hall.doors.max_strangers


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("1.2.3.4", "5.6.7.8", "1.2.3.4"),  # not a trusted proxy: anyone can send the header
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "5.6.7.8", "5.6.7.8"),
        ("10.0.0.1", "6.6.6.6, 5.6.7.8", "5.6.7.8"),  # what the client itself wrote is in front
        ("10.0.0.1", "6.6.6.6, 5.6.7.8, 10.0.0.2", "5.6.7.8"),
        ("10.0.0.1", "5.6.7.8, nonsense, 10.0.0.2", "10.0.0.2"),
        ("::ffff:10.0.0.1", "5.6.7.8", "5.6.7.8"),
        ("10.0.0.1", "2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "", "fe80::/64"),
        ("", "5.6.7.8", ""),
    ],
)
def test_the_address_that_a_request_counts_for(peer: str, forwarded: str, found: str) -> None:
    headers = [(b"host", b"x"), (FORWARDED, forwarded.encode())] if forwarded else []
    assert client_address(peer, headers, networks(["10.0.0.0/8"])) == found


@pytest.mark.parametrize(
    ("peer", "said", "found"),
    [
        ("10.0.0.1", "https", "https"),
        ("10.0.0.1", "HTTPS", "https"),
        ("10.0.0.1", "http", "http"),
        ("10.0.0.1", "javascript", "http"),
        ("1.2.3.4", "https", "http"),  # not a trusted proxy: anyone can send the header
        ("", "https", "http"),
    ],
)
@pytest.mark.anyio
async def test_addresses_in_an_answer_have_the_scheme_by_which_its_request_came(
    peer: str, said: str, found: str
) -> None:
    urls = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        urls.append(str(Request(scope).base_url))
        await Response()(scope, receive, send)

    admission = AdmissionControl(Keyring({}), DoorLimits(trusted=networks(["10.0.0.0/8"])))
    admission.open_paths.add("/")
    transport = httpx.ASGITransport(AdmissionMiddleware(app, admission), client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://host:8443") as http:
        assert (await http.get("/", headers={"x-forwarded-proto": said})).is_success
    assert urls == [f"{found}://host:8443/"]


def test_headers_of_several_proxies_are_read_from_the_last_on() -> None:
    headers = [(FORWARDED, b"6.6.6.6"), (FORWARDED, b"5.6.7.8")]
    assert client_address("10.0.0.1", headers, networks(["10.0.0.1"])) == "5.6.7.8"
    endless = [(FORWARDED, b",".join([b"10.0.0.1"] * 5000))]
    assert client_address("10.0.0.1", endless, networks(["10.0.0.1"])) == "10.0.0.1"


# ---- open routes ----------------------------------------------------------------------------------------------------
HALF = b"POST /open HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n%s\r\n{"


@contextmanager
def door(limits: DoorLimits | None = None) -> Iterator[str]:
    """A server with an open route that reads a body."""

    router = APIRouter(route_class=OpenRoute)

    @router.post("/open")
    async def read(asked: Schema) -> None:
        """Read a body."""

    app = create_app(ScriptedService(), keyring=Keyring({"key": None}), limits=limits)
    include(app, router)
    with running(app) as url:
        yield url


def half(url: str, stack: ExitStack, header: bytes = b"") -> socket.socket:
    client = stack.enter_context(connected(url))
    client.sendall(HALF % header)
    return client


def first_line(client: socket.socket, wait: float) -> bytes | None:
    """What the server says; None if it says nothing for so long."""
    return client.recv(65_536).split(b"\r\n")[0] if select.select([client], [], [], wait)[0] else None


@pytest.mark.parametrize("trusted", [(), ("127.0.0.1",)])
def test_places_of_open_routes_are_counted_by_the_address_behind_a_trusted_proxy(trusted: tuple[str, ...]) -> None:
    with door(DoorLimits(64, networks(trusted))) as url, ExitStack() as stack:
        for _ in range(MAX_OPEN_PER_ADDRESS):
            half(url, stack, FORWARDED + b": 1.1.1.1\r\n")
        assert (first_line(half(url, stack, FORWARDED + b": 1.1.1.1\r\n"), WAIT) or b"").startswith(b"HTTP/1.1 429 ")
        other = half(url, stack, FORWARDED + b": 2.2.2.2\r\n")
        other.sendall(b'"a": 12}')
        expected = b"HTTP/1.1 200 OK" if trusted else b"HTTP/1.1 429 Too Many Requests"
        assert first_line(other, WAIT) == expected


@pytest.mark.anyio
async def test_a_body_is_in_time_or_a_408_and_the_clients_end_is_waited_for() -> None:
    ended = asyncio.Event()
    messages = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.request", "body": b"b"}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop(0)
        await ended.wait()
        return {"type": "http.disconnect"}

    timely = within(receive, 0.01)
    assert [await timely(), await timely()] and not messages
    asyncio.get_running_loop().call_later(0.05, ended.set)
    assert await timely() == {"type": "http.disconnect"}
    ended.clear()
    with pytest.raises(RequestError) as slow:
        await within(receive, 0.01)()
    assert slow.value.status == 408


# ---- logs and descriptors -------------------------------------------------------------------------------------------
def test_a_message_is_logged_once_a_minute_with_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seldom = 0.0, Seldom()
    read_from(monkeypatch, lambda: now, logs)

    def passes(message: str, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("x", level, "", 0, message, (), None)
        return record.msg if seldom.filter(record) else None

    assert [passes("full"), passes("full"), passes("full"), passes("bad")] == ["full", None, None, "bad"]
    now = PAUSE_S
    assert passes("full") == "full (2 more times since the last line)"
    assert passes("news", logging.INFO) == passes("news", logging.INFO) == "news"


@pytest.mark.anyio
async def test_a_storm_of_failed_accepts_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    try:
        quieten(loop)
        for _ in range(512):
            context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many files")}
            loop.call_exception_handler(context)
        loop.call_exception_handler({"message": "another fault"})
    finally:
        loop.set_exception_handler(before)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "Too many files" in lines[0] and "another fault" in lines[1]


def test_a_thousand_streams_fit_below_every_limit() -> None:
    """Each limit is above the one inside it, so that the innermost refuses, with its own message."""
    assert 1000 <= MAX_ANSWERS < MAX_ACTIVE < MAX_CONNECTIONS < MAX_FILES


@pytest.mark.parametrize(("files", "connections"), [(64, 32), (1024, 512), (4096, MAX_CONNECTIONS), (1 << 20, 2048)])
def test_connections_follow_the_limit_of_open_files(files: int, connections: int) -> None:
    assert connections_within(files) == connections
