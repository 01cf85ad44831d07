"""Transport of a link: whole binary messages in order, and a close with a code. Implemented by the `websockets` client
on a device, by a Starlette WebSocket on a cloud, and by a stream of TLS between the processes of a model in stages.

Overrides the defaults of both libraries, which compress, ping every 20 s and accept 16 MiB.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

from httpx import InvalidURL
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidProxy, InvalidURI
from websockets.typing import Subprotocol

from paceline.core.addresses import is_loopback
from paceline.core.printable import printable
from paceline.errors import ConfigError, LinkClosed, RemoteProtocolError
from paceline.system import by_proxy, tls_fault, unusable_proxy
from paceline.wire.close_codes import CloseCode
from paceline.wire.messages import MAX_CONTROL_BYTES, MAX_FRAME_BYTES, SUBPROTOCOL

OPEN_TIMEOUT_S = 10.0  # for TCP, TLS and the HTTP upgrade together
CLOSE_TIMEOUT_S = 2.0
ECHO_S = 1.0  # for a device's answer to a close frame, before the connection is broken
WRITE_LIMIT = 65_536  # bytes the library buffers before a send waits; the link bounds its own queue
MAX_QUEUED_FRAMES = 16  # received and unread; beyond, the library stops reading
BUFFERED_BYTES = 1 << 18  # of a stream, before either end waits
LENGTH_BYTES, CODE_BYTES = 4, 2  # of a stream's messages, and of the code of its end
END = b"\1"  # how that begins; no message does
UNUSABLE = (ImportError, ValueError, InvalidProxy, InvalidURL)  # of a proxy or a URL, before it is dialled
CONNECTION = "paceline.connection"  # in an ASGI scope's `state`: the `Connection` below, where the server knows it


class TransportClosed(LinkClosed):
    """The connection has ended: closed by the peer with this code, or broken (1006)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"connection closed with code {code}: {reason}")
        self.code = code
        self.reason = reason


class Transport(Protocol):
    """A connection used by one link. A send may run concurrently with a receive, but not with another send."""

    async def send_bytes(self, data: bytes) -> None:
        """Send a message. Waits while the peer reads too slowly. Raises TransportClosed."""

    async def recv_bytes(self) -> bytes:
        """The next message. Raises TransportClosed, or RemoteProtocolError for a text message."""

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame; no effect after the end. May wait while the peer does not read."""

    def abort(self) -> None:
        """Break the connection at once."""


class Connection(Protocol):
    """The TCP connection below a WebSocket, which ASGI hides."""

    def admitted(self) -> None:
        """The other end is known now: limits on strangers no longer concern it."""

    def abort(self) -> None:
        """Break it at once."""


class ClientTransport:
    """A device's end, on a connection of the `websockets` library."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send_bytes(self, data: bytes) -> None:
        try:
            await self._connection.send(data)
        except ConnectionClosed as closed:
            raise _transport_closed(closed) from closed

    async def recv_bytes(self) -> bytes:
        try:
            data = await self._connection.recv()
        except ConnectionClosed as closed:
            raise _transport_closed(closed) from closed
        if isinstance(data, str):
            raise RemoteProtocolError("a text message", close_code=CloseCode.BAD_FRAME)
        return data

    async def close(self, code: int, reason: str) -> None:
        await self._connection.close(code, reason)

    def abort(self) -> None:
        self._connection.transport.abort()


class ServerTransport:
    """A cloud's end, on an accepted Starlette WebSocket.

    Where the server does not pass its connection on (`CONNECTION`), `abort` cannot break it: then nothing more is sent,
    and the server closes it some time after the route has returned.
    """

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._aborted = False
        self._connection: Connection | None = websocket.scope.get("state", {}).get(CONNECTION)

    def admitted(self) -> None:
        if self._connection is not None:
            self._connection.admitted()

    async def send_bytes(self, data: bytes) -> None:
        try:
            await self._websocket.send_bytes(data)
        except (WebSocketDisconnect, RuntimeError) as error:  # RuntimeError: a close has been sent or received before
            raise TransportClosed(1006, "") from error

    async def recv_bytes(self) -> bytes:
        try:
            message = await self._websocket.receive()
        except RuntimeError as error:
            raise TransportClosed(1006, "") from error
        if message["type"] == "websocket.disconnect":
            raise TransportClosed(message.get("code", 1006), message.get("reason") or "")
        data = message.get("bytes")
        if not isinstance(data, bytes):
            raise RemoteProtocolError("a text message", close_code=CloseCode.BAD_FRAME)
        return data

    async def close(self, code: int, reason: str) -> None:
        """Send a close frame and wait for the peer's, but not for one that has never spoken: its time is over."""
        if self._aborted:
            return
        try:
            await self._websocket.close(code, reason)
            if self._connection is None or code == CloseCode.HANDSHAKE_TIMEOUT:
                return
            async with asyncio.timeout(ECHO_S):
                while (await self._websocket.receive())["type"] != "websocket.disconnect":
                    pass
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            return  # already closed, or it does not answer

    def abort(self) -> None:
        self._aborted = True
        if self._connection is not None:
            self._connection.abort()


class StreamTransport:
    """Messages on a stream, each behind its length in four bytes, big-endian; the last one may be `END`, a close code
    in two bytes, and a detail. What is sent is written by `flush`, or when it is much."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.max_bytes = MAX_CONTROL_BYTES  # of a message, until the other end is known
        self._reader, self._writer = reader, writer
        self._parts: list[bytes] = []
        self._size = 0

    async def send_bytes(self, data: bytes) -> None:
        self._parts += len(data).to_bytes(LENGTH_BYTES, "big"), data
        self._size += len(data)
        if self._size >= BUFFERED_BYTES:
            self.flush()
            try:
                await self._writer.drain()
            except OSError as error:
                raise TransportClosed(1006, "") from error

    def flush(self) -> None:
        if self._parts:
            self._writer.write(b"".join(self._parts))
            self._parts.clear()
            self._size = 0

    async def recv_bytes(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if size > self.max_bytes:
                raise RemoteProtocolError(f"a frame of {size} bytes", close_code=CloseCode.TOO_LARGE)
            data = await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TransportClosed(1006, "") from error
        if data[:1] == END:
            code = int.from_bytes(data[1 : 1 + CODE_BYTES], "big")
            raise TransportClosed(code, data[1 + CODE_BYTES :].decode("utf-8", "replace"))
        return data

    async def close(self, code: int, reason: str) -> None:
        with suppress(OSError, TransportClosed):  # it is closed
            await self.send_bytes(END + code.to_bytes(CODE_BYTES, "big") + reason.encode())
            self.flush()
            self._writer.close()
            await self._writer.wait_closed()

    def abort(self) -> None:
        self._writer.transport.abort()


class _Connect(connect):
    """A connection to the URL itself: where one is sent on to is a page for signing in, or a proxy's https."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


async def dial(url: str) -> Transport:
    """Connect to a cloud's link. Raises LinkClosed with a sentence on failure, ConfigError for an invalid URL.

    Uses the proxy of the environment, except for this machine.
    """
    try:
        connection = await _Connect(
            url,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,  # it leaks the lengths of secrets, and a small frame may decompress to a huge one
            ssl=True if urlsplit(url).scheme == "wss" else None,  # True: as the system verifies
            proxy=None if is_loopback(urlsplit(url).hostname or "") else True,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=None,  # the link's own heartbeat is faster
            ping_timeout=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=MAX_QUEUED_FRAMES,
            write_limit=WRITE_LIMIT,
        )
    except InvalidURI as error:
        raise ConfigError(f"{url!r} is not a link's URL; it looks like wss://host:port/link") from error
    except Exception as error:  # a proxy's, too, of many kinds: none may end the program, which works without a cloud
        raise LinkClosed(unreachable(url, error)) from error
    return ClientTransport(connection)  # asyncio has set TCP_NODELAY


def unreachable(url: str, error: Exception) -> str:
    """Why a cloud cannot be asked, and what to do about its certificate, or none, or about a proxy."""
    if fault := tls_fault(url, error):
        return fault
    if isinstance(error, UNUSABLE) and (fault := unusable_proxy()):
        return f"cannot reach {url}: {fault}"
    said = (isinstance(error, InvalidMessage) and error.__cause__) or error  # that is, what came
    return f"cannot reach {url}{by_proxy(url)}: {printable(str(said)) or 'no answer in time'}"


def is_secret(url: str) -> bool:
    """True if the connection is encrypted or stays on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "wss" or is_loopback(parts.hostname or "")


UVICORN_LINK_OPTIONS: dict[str, Any] = {  # of `uvicorn.Config`: they cannot be set within a route
    "ws_max_size": MAX_FRAME_BYTES,
    "ws_max_queue": MAX_QUEUED_FRAMES,
    "ws_ping_interval": None,  # the link has its own heartbeat
    "ws_ping_timeout": None,
    "ws_per_message_deflate": False,  # against zip bombs, and lengths that reveal secrets
}


def _transport_closed(closed: ConnectionClosed) -> TransportClosed:
    frame = closed.rcvd or closed.sent
    return TransportClosed(frame.code, frame.reason) if frame else TransportClosed(1006, "")
