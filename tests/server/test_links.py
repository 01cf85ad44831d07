"""Devices on real links to a real server: admission, revocation, and an agent's enrolment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from device_agent import cloud
from device_agent.cloud import Cloud, Credential, Credentials, exchange, http_url, link_url
from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.server import HttpServer, listen, url_of
from paceline.errors import ConfigError, LinkClosed, StorageError
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.connection import Link
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import SUBPROTOCOL
from server import links
from server.app import add_devices
from server.devices import Registry
from server.links import Links
from tests.api.scripted import WAIT, ScriptedService
from tests.wire.identities import CLOUD, DEVICE
from tests.wire.samples import opening

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("cheap_codes")]
KEY = PrivateKey(bytes([1] * 32))


class Peers:
    """A receiver that only records links."""

    def __init__(self) -> None:
        self.links: asyncio.Queue[tuple[Link, str]] = asyncio.Queue()

    def on_link(self, link: Link, peer: str) -> None:
        self.links.put_nowait((link, peer))


class Site:
    """A running server with its registry, and the agents linked to it."""

    def __init__(self, url: str, registry: Registry, live: Links, peers: Peers, tasks: asyncio.TaskGroup) -> None:
        self.url = url
        self.registry = registry
        self.live = live
        self.peers = peers
        self.kept: list[asyncio.Task[None]] = []
        self._tasks = tasks

    def agent(self, state: Path, code: str | None, up: Callable[[Link], None]) -> Cloud:
        return Cloud([self.url], Credentials(state), code=code, name="phone", introduce=lambda: DEVICE, up=up)

    async def linked(self, state: Path, code: str | None) -> tuple[Link, Link]:
        """(the server's end, the agent's end)"""
        ends: asyncio.Queue[Link] = asyncio.Queue()
        cloud = self.agent(state, code, ends.put_nowait)
        await cloud.enrol()
        self.keep(cloud)
        ours, _ = await self.peers.links.get()
        return ours, await ends.get()

    def keep(self, cloud: Cloud) -> None:
        self.kept.append(self._tasks.create_task(cloud.keep_linked()))


@asynccontextmanager
async def site(state: Path, *, key: PrivateKey = KEY, **settings: Any) -> AsyncIterator[Site]:
    registry, peers = Registry(state / "server"), Peers()
    live = Links(registry, peers.on_link, lambda: CLOUD, key=key, **settings)
    listener = listen("127.0.0.1", 0)
    url, ready = url_of(listener), asyncio.Event()
    server = HttpServer(
        add_devices(create_app(ScriptedService(), keyring=Keyring({"k": None})), registry, live), ready.set
    )
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve([listener]))
        await ready.wait()
        async with asyncio.TaskGroup() as agents:
            watching = agents.create_task(live.watch())
            here = Site(url, registry, live, peers, agents)
            try:
                yield here
            finally:
                for task in here.kept:
                    task.cancel()
                watching.cancel()
                server.stop()
        await serving


async def test_an_agent_enrols_later_when_its_cloud_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    async def unreachable_once(cloud: str, code: str, key: PrivateKey) -> Credential:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise LinkClosed("not there yet")
        return await exchange(cloud, code, key)

    monkeypatch.setattr("device_agent.cloud.exchange", unreachable_once)
    async with site(tmp_path) as here:
        cloud = here.agent(tmp_path / "agent", here.registry.add("phone"), lambda _: None)
        assert not await cloud.enrol()
        here.keep(cloud)
        _, name = await here.peers.links.get()
        assert (name, attempts) == ("phone", 2)


async def test_a_device_whose_enrolment_was_taken_and_not_answered_is_enrolled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, lost = cloud._post, 3  # answers, of as many requests

    async def losing(url: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        nonlocal lost
        answer = await post(url, body)
        if lost > 0:
            lost -= 1
            raise LinkClosed("no answer in time")
        return answer

    monkeypatch.setattr(cloud, "_post", losing)
    async with site(tmp_path) as here:
        agent = here.agent(tmp_path / "agent", here.registry.add("phone"), lambda _: None)
        assert not await agent.enrol()
        here.keep(agent)
        assert (await here.peers.links.get())[1] == "phone"


async def test_nobody_is_there_or_somebody_else(tmp_path: Path) -> None:
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    listener.close()
    with pytest.raises(LinkClosed, match="cannot reach"):
        await exchange(url, "AAAA-BBBB-CCCC-DDDD")
    async with site(tmp_path) as here:
        with pytest.raises(ConfigError, match="did not enrol"):
            await exchange(f"{here.url}/elsewhere", "AAAA-BBBB-CCCC-DDDD")


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, b"[" * 100_000, "Is it a Paceline server"),
        (200, b'{"device": "' + b"x" * (1 << 20) + b'"}', "Is it a Paceline server"),
        (200, b'{"device": "phone", "credential": "secret"}', "Is it a Paceline server"),
        (401, b'{"error": {"message": "no\\u001b[2Jyou\\n2026 CRITICAL all is lost"}}', "no [2Jyou 2026 CRITICAL"),
        (401, b'{"error": {"message": "' + b"x" * 60_000 + b'"}}', "x" * 400),
    ],
    ids=["nested", "huge", "another release", "control characters", "long"],
)
async def test_an_answer_of_anybody_is_read_with_limits_and_told_in_clean_sentences(
    status: int, content: bytes, said: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        head = f"HTTP/1.1 {status} Yes\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        with suppress(ConnectionError):  # the agent has heard enough
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError) as refusal:
            await exchange(f"http://127.0.0.1:{port}", "AAAA-BBBB-CCCC-DDDD")
    assert said in str(refusal.value)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 600


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in caplog.text:
            await asyncio.sleep(0.01)


def connected(url: str) -> connect:
    return connect(link_url(url), subprotocols=[Subprotocol(SUBPROTOCOL)], ping_interval=None, proxy=None)


async def test_links_are_cut_where_the_registry_cannot_be_read_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise StorageError("disk I/O error")

    async with site(tmp_path) as here:
        phone, _ = await here.linked(tmp_path / "phone", here.registry.add("phone"))
        standings = here.registry.standings
        monkeypatch.setattr(here.registry, "standings", broken)
        await here.live.check()
        monkeypatch.setattr(here.registry, "standings", standings)
        await here.live.check()  # it can be read again
        monkeypatch.setattr(here.registry, "standings", broken)
        monkeypatch.setattr(links, "UNREAD_S", 0.0)
        await here.live.check()
        assert not phone.closed.is_set(), "a moment's trouble costs nobody the link"
        await here.live.check()
        assert phone.closed.is_set()


async def test_other_devices_keep_their_links_when_one_is_revoked(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        phone, _ = await here.linked(tmp_path / "phone", here.registry.add("phone"))
        laptop, _ = await here.linked(tmp_path / "laptop", here.registry.add("laptop"))
        here.registry.revoke("phone")
        await here.live.check()
        assert phone.closed.is_set() and not laptop.closed.is_set()


async def test_a_second_link_of_a_device_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        code = here.registry.add("phone")
        first, _ = await here.linked(tmp_path / "agent", code)
        second, _ = await here.linked(tmp_path / "agent", code)  # a used code does no harm at a second start
        await first.closed.wait()
        assert first.close_code == CloseCode.DUPLICATE_DEVICE
        assert not second.closed.is_set()


@pytest.mark.parametrize(
    ("cloud", "http", "link"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/link"),
        ("https://Example.org/", "https://example.org", "wss://example.org/v1/link"),
        ("wss://example.org/base/", "https://example.org/base", "wss://example.org/base/v1/link"),
    ],
)
def test_a_clouds_address_has_two_forms(cloud: str, http: str, link: str) -> None:
    assert (http_url(cloud), link_url(cloud)) == (http, link)


async def test_a_server_ends_though_its_database_is_gone() -> None:
    app = create_app(ScriptedService(), keyring=Keyring({"k": None}))

    async def hand_over() -> None:
        raise StorageError("It cannot be reached.", away=True)

    app.state.responses.log.release = hand_over
    app.state.admission.on_drain = app.state.responses.leave
    listener, ready = listen("127.0.0.1", 0), asyncio.Event()
    server = HttpServer(app, ready.set)
    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]))
        await ready.wait()
        server.stop()
    listener.close()


async def test_devices_of_a_server_that_drains_go_to_another_between_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "WATCH_S", 0.05)
    async with site(tmp_path) as leaving, site(tmp_path) as other:
        code, urls = leaving.registry.add("phone"), [leaving.url, other.url]

        def take_part(link: Link) -> None:
            link.on_open = lambda asked: link.attach(asked.session, lambda _: None)

        credentials = Credentials(tmp_path / "agent")
        cloud = Cloud(urls, credentials, code=code, name="phone", introduce=lambda: DEVICE, up=take_part)
        await cloud.enrol()
        leaving.keep(cloud)
        link, _ = await leaving.peers.links.get()
        session = link.open_session(lambda _: None)
        link.send(opening(session))
        leaving.live.is_leaving = lambda: True
        looked = asyncio.Event()
        leaving.live.renew = _then(leaving.live.renew, looked)  # type: ignore[method-assign]
        for _ in range(3):
            await looked.wait()
            looked.clear()
        assert link.accepting, "an answer is under way"
        link.detach(session)
        async with asyncio.timeout(WAIT):
            await other.peers.links.get()
        assert (link.close_code, leaving.peers.links.empty()) == (CloseCode.DRAINED, True)


def _then(work: Callable[[], Awaitable[None]], done: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def both() -> None:
        await work()
        done.set()

    return both


async def test_an_enrolment_refused_later_leaves_the_agent_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tmp_path) as here:
        cloud = here.agent(tmp_path / "agent", "AAAA-BBBB-CCCC-DDDD", lambda _: None)
        await cloud.keep_linked()  # returns, since enrolment was refused
        assert "answers alone" in caplog.text


async def test_the_watch_outlives_a_registry_that_cannot_be_read_from_the_first_look_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, looks = Registry(tmp_path), asyncio.Semaphore(0)

    @contextmanager
    def watching() -> Iterator[Callable[[], int]]:
        def version() -> int:
            looks.release()
            raise StorageError("the database cannot be reached", away=True)

        yield version

    monkeypatch.setattr(registry, "watching", watching)
    monkeypatch.setattr(links, "WATCH_S", 0.0)
    watch = asyncio.create_task(Links(registry, Peers(), lambda: CLOUD, key=KEY).watch())
    for _ in range(3):
        looked = asyncio.create_task(looks.acquire())
        await asyncio.wait({looked, watch}, return_when=asyncio.FIRST_COMPLETED)
        assert not watch.done(), watch.exception()
    watch.cancel()
