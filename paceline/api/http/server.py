"""The HTTP server: listen, serve, and drain on a signal.

Every limit of uvicorn is set here, none left to its default. A first SIGTERM or Ctrl-C drains: new requests are
refused, links stay up, answers finish; a second one ends at once. Both end the process normally, so that everything
that was started is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from paceline.api.http.limits.admission import AdmissionControl
from paceline.api.http.limits.doors import Doors
from paceline.api.http.limits.timeouts import HttpConnection
from paceline.api.http.logs import quieten
from paceline.errors import ConfigError
from paceline.runtime.garbage import freeze_heap
from paceline.runtime.link.transport import MAX_QUEUED_FRAMES
from paceline.wire.messages import MAX_FRAME_BYTES

DRAIN_S = 30.0  # for answers to end after the first signal
CLOSE_S = 3  # for connections to close after that
BACKLOG = 512
MAX_CONNECTIONS = 2048  # idle ones included; beyond it uvicorn answers 503 itself, some more are broken unread
MAX_FILES = 2 * MAX_CONNECTIONS  # open files: sockets, and those of the stores
MAX_HEADERS = 32 * 1024  # bytes; h11's default is 16 KiB, browsers with many cookies send more
KEEP_ALIVE_S = 30  # an idle connection; OpenAI's clients drop theirs after 5

_log = logging.getLogger("paceline.api")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free port. Raises ConfigError when the address cannot be used."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {host}: {error.strerror}. Is the address one of this machine?") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror}. Stop what uses it, or choose another --port."
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class LinkSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, which decodes no text. The link has none and closes at the first; uvicorn logs an error with
    a traceback for each that is not UTF-8, and for one that is followed by a close frame another."""

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            self.frames = [b""]
        super().send_receive_event_to_app()


class HttpServer(uvicorn.Server):
    """uvicorn with a drain before its shutdown. `on_ready`: called once it listens."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None], *, max_connections: int = MAX_CONNECTIONS) -> None:
        admission = app.state.admission
        assert isinstance(admission, AdmissionControl), "made by create_app"
        doors = Doors(admission.limits, max_connections)
        connection = partial(HttpConnection, doors=doors, max_connections=max_connections * 5 // 4)
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=connection,  # type: ignore[arg-type]  # uvicorn calls it, and asks for no class
                ws=LinkSocket,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws_max_size=MAX_FRAME_BYTES,
                ws_max_queue=MAX_QUEUED_FRAMES,
                ws_ping_interval=None,  # the link has its own heartbeat
                ws_ping_timeout=None,
                ws_per_message_deflate=False,  # against zip bombs, and lengths that reveal secrets
                h11_max_incomplete_event_size=MAX_HEADERS,
                limit_concurrency=max_connections,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._admission = admission
        self._closers: Sequence[Callable[[], Awaitable[None]]] = app.state.closers
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        quieten(self._loop)
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for close in self._closers:
            await close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's signature
        """Stop on a signal. Does not record it: uvicorn would raise it again before the rest is stopped."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Drain and end; on a second call, end at once. Called on the loop's thread."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._admission.drain()
        except TimeoutError:
            _log.warning("%d requests were still running after %g s and are cut", self._admission.active, DRAIN_S)
        self.should_exit = True


async def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None],
    until: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve `app`, made by `create_app`, until a signal has drained it, or what `until` waits for has happened."""
    server = HttpServer(app, on_ready, max_connections=connections_within(_raise_file_limit()))

    async def stop() -> None:
        if until is not None:
            await until()
            server.stop()

    with freeze_heap():
        stopping = asyncio.create_task(stop())
        try:
            await server.serve(sockets=[listener])
        finally:
            stopping.cancel()


def connections_within(files: int) -> int:
    """Connections that so many open files allow: half of them, and MAX_CONNECTIONS at most."""
    return max(1, min(MAX_CONNECTIONS, files // 2))


def _raise_file_limit() -> int:
    """Allow as many open files as connections need: the default of many systems is 1,024. Returns what is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft == resource.RLIM_INFINITY:
        return MAX_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    allowed = max(soft, wanted)
    if allowed < MAX_FILES:
        _log.warning(
            "only %d files may be open, so that %d connections are taken instead of %d: raise the hard limit (ulimit "
            "-Hn, or LimitNOFILE of a service) to %d",
            allowed,
            connections_within(allowed),
            MAX_CONNECTIONS,
            MAX_FILES,
        )
    return allowed
