"""Ends of a link that were admitted by a true handshake, and then send any bytes: a hostile device, a hostile cloud."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from starlette.websockets import WebSocket

from device_agent.cloud import Credential, exchange, link_url
from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.server import HttpServer, listen, url_of
from paceline.engine.fake import fake_model
from paceline.errors import LinkClosed, RemoteProtocolError
from paceline.runtime.identity import PrivateKey, cloud_handshake, device_handshake
from paceline.runtime.link.transport import ServerTransport, Transport, TransportClosed, dial
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode, encode
from paceline.wire.messages import (
    SUBPROTOCOL,
    Challenge,
    Drain,
    Hello,
    Introduction,
    NewKey,
    OpenSession,
    Ping,
    Pong,
    Proof,
    Welcome,
)
from server.app import add_devices
from server.devices import Registry
from server.links import Links
from tests.api.scripted import ScriptedService
from tests.postgres import registry_of

TAKEN_S = 60.0  # for the other end to take what was sent


class RawLink:
    """An admitted connection. It answers heartbeats, keeps all that it receives, and says nothing else by itself."""

    def __init__(self, transport: Transport, *, parity: int) -> None:
        """parity: of the session numbers of this end, 0 on a cloud and 1 on a device."""
        self.received: list[bytes] = []
        self.sent: list[bytes] = []  # frames of the handshake, and those of `send`
        self.opened: asyncio.Queue[OpenSession] = asyncio.Queue()  # sessions that the other end opens
        self.new_keys: list[bytes] = []  # public ones, of a device that was asked to renew
        self.closed = asyncio.Event()
        self.close_code: int | None = None  # of the other end; None: this end has closed
        self.draining = False  # either end has said that it takes no new sessions
        self.transport = transport
        self._sending = asyncio.Lock()
        self._next = parity
        self._asked = 0.0  # the last `sent_at` of `settled`
        self._answered = asyncio.Event()

    def number(self) -> int:
        """The next session number of this end."""
        self._next += 2
        return self._next

    async def send(self, *frames: bytes) -> None:
        """Send these; what comes after the end of the connection is dropped."""
        for frame in frames:
            self.sent.append(frame)
            async with self._sending:
                try:
                    await self.transport.send_bytes(frame)
                except TransportClosed:
                    return

    async def run(self) -> None:
        """Read until the connection ends."""
        try:
            while True:
                frame = await self.transport.recv_bytes()
                self.received.append(frame)
                match decode(frame):
                    case Ping(sent_at=sent_at):
                        await self.send(encode(Pong(sent_at, 0.0)))
                    case OpenSession() as opening:
                        self._next = max(self._next, opening.session + 1)
                        self.opened.put_nowait(opening)
                    case Pong(sent_at=sent_at) if sent_at == self._asked:
                        self._answered.set()
                    case NewKey(key=key):
                        self.new_keys.append(key)
                    case Drain():
                        self.draining = True
                    case _:
                        pass
        except TransportClosed as end:
            self.close_code = end.code
        finally:
            self.closed.set()

    async def settled(self) -> None:
        """Wait until the other end has taken all that was sent, or has closed."""
        self._asked -= 1.0
        self._answered.clear()
        await self.send(encode(Ping(self._asked)))
        either = [asyncio.create_task(event.wait()) for event in (self._answered, self.closed)]
        try:
            async with asyncio.timeout(TAKEN_S):
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in either:
                task.cancel()

    async def close(self, code: int = 1000) -> None:
        await self.transport.close(code, "")

    def abort(self) -> None:
        self.transport.abort()


def introduction() -> Introduction:
    """Introduction of a device with the fake model, with as many documents as there are in the world."""
    model = fake_model()
    known = model.tokenizer.fingerprint, model.engine.info.fingerprint
    return Introduction(*known, "honest", list(STRATEGIES), 2**31 - 1, asked_by=None)


async def enrolled(url: str, state: Path, name: str) -> Credential:
    """The credential of a new device at a server with this state folder."""
    return await exchange(url, registry_of(state).add(name))


async def device_link(url: str, credential: Credential) -> RawLink:
    """Link as this device. Its `run` is the caller's. Raises LinkClosed when the server refuses."""
    link = RawLink(await dial(link_url(url)), parity=1)
    handshake = device_handshake(
        introduction(), device=credential.device, keys=credential.keys, server_key=credential.server_key
    )
    await link.send(handshake.begin())
    challenge = await link.transport.recv_bytes()
    heard = decode(challenge)
    assert isinstance(heard, Challenge)
    assert handshake.challenged(heard, challenge).proves(credential.server_key)
    await link.send(handshake.prove(credential.server_key))
    frame = await link.transport.recv_bytes()
    welcome = decode(frame)
    assert isinstance(welcome, Welcome)
    handshake.welcomed(welcome, frame)
    return link


class RawLinks(Links):
    """The server's route for links, with nothing behind the handshake."""

    links: asyncio.Queue[RawLink]
    known: Introduction
    keys: list[bytes]  # of the devices, the newest last; whoever proves one is let in

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept(subprotocol=SUBPROTOCOL)
        transport = ServerTransport(websocket)
        handshake = cloud_handshake(self.known, self.key)
        try:
            hello = await transport.recv_bytes()
            greeting = decode(hello)
            assert isinstance(greeting, Hello)
            await transport.send_bytes(handshake.greeted(greeting, hello))
            frame = await transport.recv_bytes()
            proof = decode(frame)
            assert isinstance(proof, Proof)
            claim = handshake.proved(proof, frame)
            key = next((key for key in reversed(self.keys) if claim.proves(key)), None)
            if key is None:  # of an enrolment since
                found = await self._authenticate(claim)
                assert isinstance(found, bytes), found
                self.keys.append(key := found)
            welcome, _ = handshake.admitted(key)
            await transport.send_bytes(welcome)
        except (LinkClosed, RemoteProtocolError):
            transport.abort()
            return
        transport.admitted()
        link = RawLink(transport, parity=0)
        self.links.put_nowait(link)
        try:
            await link.run()
        finally:
            self.keys += link.new_keys
            transport.abort()


class _Nobody:
    def on_link(self, link: object, peer: str) -> None:
        raise AssertionError(f"{peer} has no link of this kind: {link}")


@asynccontextmanager
async def serving(listener: socket.socket, registry: Registry, live: Links) -> AsyncIterator[None]:
    """The real routes of a server, and no node behind them."""
    ready = asyncio.Event()
    server = HttpServer(add_devices(create_app(ScriptedService(), keyring=Keyring({})), registry, live), ready.set)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]))
        await ready.wait()
        try:
            yield
        finally:
            server.stop()


@asynccontextmanager
async def raw_cloud(state: Path, known: Introduction) -> AsyncIterator[tuple[str, Registry, RawLinks]]:
    """URL, registry and links of a cloud that does nothing by itself. known: how it introduces itself."""
    with closing(listen("127.0.0.1", 0)) as listener:
        registry = Registry(state)
        live = RawLinks(registry, _Nobody().on_link, lambda: known, key=PrivateKey.generate())
        live.links, live.known, live.keys = asyncio.Queue(), known, []
        async with serving(listener, registry, live):
            yield url_of(listener), registry, live
