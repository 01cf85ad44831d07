"""The link over real WebSockets: uvicorn with the options a server must have, and the `websockets` client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.runtime.link.connection import Dialer, Link, serve_websocket
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.link.transport import UVICORN_LINK_OPTIONS, dial
from paceline.system import PROXY
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import encode
from paceline.wire.messages import MAX_FRAME_BYTES, SUBPROTOCOL, VERSION, OpenSession
from tests.wire.identities import CLOUD, DEVICE, LAPTOP, admit, cloud_end, device_end
from tests.wire.samples import closing, have, opening, targets

pytestmark = pytest.mark.anyio


class Cloud:
    """A server whose sessions answer every message with `targets`."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.url = ""

    async def route(self, websocket: WebSocket) -> None:
        await serve_websocket(websocket, handshake=cloud_end(), authenticate=admit, on_link=self.linked, vocab_size=100)

    def linked(self, link: Link) -> None:
        self.links.append(link)

        def join(message: OpenSession) -> None:
            link.attach(message.session, lambda _: link.send(targets(message.session)))

        link.on_open = join


@asynccontextmanager
async def cloud() -> AsyncIterator[Cloud]:
    served = Cloud()
    app = Starlette(routes=[WebSocketRoute("/link", served.route)])
    config = uvicorn.Config(app, log_level="error", lifespan="off", **UVICORN_LINK_OPTIONS)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    served.url = f"ws://127.0.0.1:{listener.getsockname()[1]}/link"
    with listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield served
        finally:
            for link in served.links:
                await link.close(CloseCode.DRAINED)
            server.should_exit = True
            await task


@asynccontextmanager
async def dialer(
    url: str, key: PrivateKey = LAPTOP, emulation: Emulation | None = None
) -> AsyncIterator[asyncio.Queue[Link]]:
    """Links that come up."""
    ups: asyncio.Queue[Link] = asyncio.Queue()
    device = Dialer(url, lambda: device_end(DEVICE, key), up=ups.put_nowait, emulation=emulation)
    task = asyncio.create_task(device.run())
    try:
        async with asyncio.timeout(20):
            yield ups
    finally:
        task.cancel()
        await asyncio.wait([task])


async def ask(link: Link) -> None:
    """Open a session, send one message, receive the reply."""
    received: asyncio.Queue[object] = asyncio.Queue()
    number = link.open_session(received.put_nowait)
    link.send(opening(number))
    link.send(have(number))
    assert await received.get() == targets(number)
    link.send(closing(number))


@asynccontextmanager
async def raw(url: str, subprotocol: str | None = SUBPROTOCOL) -> AsyncIterator[ClientConnection]:
    """A client that may send any frames."""
    subprotocols = None if subprotocol is None else [Subprotocol(subprotocol)]
    async with connect(url, subprotocols=subprotocols, max_size=None, ping_interval=None, proxy=None) as connection:
        yield connection


async def end_of(connection: ClientConnection) -> tuple[int, str]:
    with pytest.raises(ConnectionClosed):
        while True:
            await connection.recv()
    assert connection.close_code is not None
    return connection.close_code, connection.close_reason or ""


async def test_a_device_and_a_cloud_exchange_messages_and_close() -> None:
    async with cloud() as served, dialer(served.url) as ups:
        link = await ups.get()
        await ask(link)
        assert link.peer == msgspec.structs.replace(CLOUD, strategies=["autoregressive", "aggregate"])
        await served.links[0].close(CloseCode.DUPLICATE_DEVICE, "laptop linked again")
        await link.closed.wait()
        assert link.close_code == CloseCode.DUPLICATE_DEVICE
        assert (link.close_reason or "").startswith("laptop linked again. ")
    assert served.links[0].closed.is_set()


async def test_a_broken_link_is_dialled_again() -> None:
    async with cloud() as served, dialer(served.url) as ups:
        for _ in range(3):
            link = await ups.get()
            await ask(link)
            link._transport.abort()  # as when the network goes
            await link.closed.wait()
            assert link.close_code == 1006
        await ask(await ups.get())
        assert len(served.links) == 4


async def test_a_server_that_is_down_or_has_no_link_gives_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkClosed, match="cannot reach"):
        await dial(f"ws://127.0.0.1:{port}/link")
    async with cloud() as served:
        with pytest.raises(LinkClosed, match="HTTP 403"):
            await dial(served.url.replace("/link", "/other"))
    with pytest.raises(ConfigError, match="wss://host:port/link"):
        await dial("http://127.0.0.1/link")


@pytest.mark.parametrize(
    ("name", "proxy"),
    [("HTTPS_PROXY", "garbage"), ("SOCKS_PROXY", "socks5://127.0.0.1:9"), ("WSS_PROXY", "http://a:b")],
)
async def test_a_proxy_that_cannot_be_used_is_a_link_that_is_closed(
    monkeypatch: pytest.MonkeyPatch, name: str, proxy: str
) -> None:
    for each in filter(PROXY.fullmatch, list(os.environ)):
        monkeypatch.delenv(each)
    monkeypatch.setenv(name, proxy)
    with pytest.raises(LinkClosed, match=f"the proxy that {name} names cannot be used"):
        await dial("wss://nosuch.example.invalid/v1/link")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: https://example.org/login\r\n\r\n", "HTTP 302"),
        (b"HTTP/1.1 302 Found\r\nLocation: ws://example.org:99999/link\r\n\r\n", "HTTP 302"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "expected HTTP/1.1: HTTP/1.0 404"),
        (b"", "connection closed while reading"),
    ],
    ids=["a page for signing in", "nowhere", "an old proxy", "nothing"],
)
async def test_what_answers_in_place_of_a_link_is_told_and_no_reason_to_give_up(answer: bytes, said: str) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        with pytest.raises(LinkClosed, match=said):
            await dial(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/link")


@pytest.mark.parametrize("subprotocol", [None, "paceline.v9"])
async def test_a_client_of_another_subprotocol_receives_the_supported_one(subprotocol: str | None) -> None:
    async with cloud() as served, raw(served.url, subprotocol) as connection:
        assert await end_of(connection) == (CloseCode.VERSION_MISMATCH, "this server speaks paceline.v1")


async def test_frames_are_not_compressed_and_sent_at_once() -> None:
    async with (
        cloud() as served,
        connect(served.url, subprotocols=[Subprotocol(SUBPROTOCOL)], proxy=None, compression="deflate") as greedy,
    ):
        assert greedy.protocol.extensions == []
        transport = await dial(served.url)
        inner: ClientConnection = transport._connection  # type: ignore[attr-defined]  # a ClientTransport's
        assert inner.subprotocol == SUBPROTOCOL
        assert inner.protocol.extensions == []
        tcp = inner.transport.get_extra_info("socket")
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await transport.close(1000, "")


async def test_an_emulated_network_carries_the_same_messages() -> None:
    async with cloud() as served:
        emulation = Emulation.parse("rtt=20ms,jitter=5ms,rate=10mbit,loss=0.01")
        async with dialer(served.url, emulation=emulation) as ups:
            await ask(await ups.get())
            assert served.links[-1].accepting


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xc1 garbage", CloseCode.BAD_FRAME),
        ("text", CloseCode.BAD_FRAME),
        (msgspec.msgpack.encode(["hello", VERSION + 1]), CloseCode.VERSION_MISMATCH),
        (encode(have(1)), CloseCode.UNEXPECTED_MESSAGE),
        (b"\x00" * (MAX_FRAME_BYTES + 1), 1009),
        ([b"\x00" * (MAX_FRAME_BYTES // 2)] * 3, 1009),
    ],
    ids=["garbage", "text", "another version", "not a hello", "too large", "too large in fragments"],
)
async def test_a_bad_frame_closes_its_link_only(frame: bytes | str | list[bytes], code: int) -> None:
    async with cloud() as served, dialer(served.url) as ups:
        honest = await ups.get()
        async with raw(served.url) as connection:
            with contextlib.suppress(ConnectionClosed):  # refused before the last fragment
                await connection.send(frame)
            assert (await end_of(connection))[0] == code
        await ask(honest)
