"""Devices on real links to a real server: admission, revocation, and an agent's enrolment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from device_agent.cloud import Cloud, exchange, http_url, link_url
from device_agent.credentials import Credential, Credentials
from paceline.api.http.auth import Keyring
from paceline.api.http.server import HttpServer, listen, url_of
from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.link.dialer import Link
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import VERSION, Hello, Welcome
from server import links
from server.app import create_server
from server.devices import Registry
from server.links import Links
from tests.api.scripted import ScriptedService

WELCOME = Welcome(
    version=VERSION, tokenizer="t", model="m", model_name="scripted", strategies=["autoregressive"], documents=3
)


def hello(credential: Credential) -> Hello:
    return Hello(
        version=VERSION,
        device=credential.device,
        credential=credential.secret,
        tokenizer="t",
        model="m",
        model_name="scripted",
        strategies=["autoregressive"],
        documents=1,
        asked_by=[],
    )


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
        return Cloud(self.url, Credentials(state), code=code, name="phone", hello=hello, up=up)

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
async def site(state: Path) -> AsyncIterator[Site]:
    registry, peers = Registry(state / "server"), Peers()
    live = Links(registry, peers, lambda: WELCOME)
    listener = listen("127.0.0.1", 0)
    url, ready = url_of(listener), asyncio.Event()
    server = HttpServer(create_server(ScriptedService(), registry, live, keyring=Keyring({"k": None})), ready.set)
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


@pytest.mark.anyio
async def test_an_agent_enrols_links_and_needs_no_code_the_next_time(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        ours, theirs = await here.linked(tmp_path / "agent", here.registry.add("phone"))
        assert isinstance(ours.peer, Hello) and ours.peer.device == "phone" and ours.peer.documents == 1
        assert isinstance(theirs.peer, Welcome) and theirs.peer.documents == 3
        await theirs.close()
        await ours.closed.wait()
        again, _ = await here.linked(tmp_path / "agent", None)
        assert isinstance(again.peer, Hello) and again.peer.device == "phone"


@pytest.mark.anyio
async def test_a_used_code_at_a_second_start_does_no_harm(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        code = here.registry.add("phone")
        _, theirs = await here.linked(tmp_path / "agent", code)
        await theirs.close()
        await here.linked(tmp_path / "agent", code)


@pytest.mark.anyio
async def test_an_agent_that_is_not_enrolled_is_told_what_to_do(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        with pytest.raises(ConfigError, match="devices add phone"):
            await here.agent(tmp_path / "agent", None, lambda _: None).enrol()
        with pytest.raises(ConfigError, match="401"):
            await here.agent(tmp_path / "agent", "AAAA-BBBB-CCCC-DDDD", lambda _: None).enrol()


@pytest.mark.anyio
async def test_an_agent_enrols_later_when_its_cloud_is_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0

    async def unreachable_once(cloud: str, code: str, name: str) -> Credential:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise LinkClosed("not there yet")
        return await exchange(cloud, code, name)

    monkeypatch.setattr("device_agent.cloud.exchange", unreachable_once)
    async with site(tmp_path) as here:
        cloud = here.agent(tmp_path / "agent", here.registry.add("phone"), lambda _: None)
        assert not await cloud.enrol()
        here.keep(cloud)
        _, name = await here.peers.links.get()
        assert (name, attempts) == ("phone", 2)


@pytest.mark.anyio
async def test_an_enrolment_refused_later_leaves_the_agent_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(tmp_path) as here:
        cloud = here.agent(tmp_path / "agent", "AAAA-BBBB-CCCC-DDDD", lambda _: None)
        await cloud.keep_linked()  # returns, since enrolment was refused
        assert "answers alone" in caplog.text


@pytest.mark.anyio
async def test_nobody_is_there_or_somebody_else(tmp_path: Path) -> None:
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    listener.close()
    with pytest.raises(LinkClosed, match="cannot reach"):
        await exchange(url, "code", "phone")
    async with site(tmp_path) as here:
        with pytest.raises(ConfigError, match="did not enrol"):
            await exchange(f"{here.url}/elsewhere", "code", "phone")


@pytest.mark.anyio
async def test_a_wrong_credential_is_not_let_in(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        here.registry.enrol(here.registry.add("phone"))
        kept = Credentials(tmp_path / "agent")
        kept.put(http_url(here.url), Credential("phone", "stolen or old"))
        cloud = here.agent(tmp_path / "agent", None, lambda _: None)
        assert await cloud.enrol()
        assert await here.live._authenticate(hello(Credential("phone", "wrong"))) == CloseCode.BAD_CREDENTIAL
        here.keep(cloud)
        assert here.peers.links.empty()


@pytest.mark.anyio
async def test_a_revoked_device_loses_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WATCH_S", 0.01)
    async with site(tmp_path) as here:
        ours, theirs = await here.linked(tmp_path / "agent", here.registry.add("phone"))
        Registry(tmp_path / "server").revoke("phone")  # as `paceline devices revoke` does, in another process
        await theirs.closed.wait()
        await ours.closed.wait()
        assert theirs.close_code == ours.close_code == CloseCode.REVOKED


@pytest.mark.anyio
async def test_other_devices_keep_their_links_when_one_is_revoked(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        phone, _ = await here.linked(tmp_path / "phone", here.registry.add("phone"))
        laptop, _ = await here.linked(tmp_path / "laptop", here.registry.add("laptop"))
        here.registry.revoke("phone")
        await here.live.check()
        assert phone.closed.is_set() and not laptop.closed.is_set()


@pytest.mark.anyio
async def test_a_second_link_of_a_device_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        first, _ = await here.linked(tmp_path / "agent", here.registry.add("phone"))
        second, _ = await here.linked(tmp_path / "agent", None)
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
