"""The HTTP server: listen, serve, and drain on a signal.

Every limit of uvicorn is set here, none left to its default. A first SIGTERM, SIGHUP or Ctrl-C drains: new requests
are refused, links stay up, answers finish; a second one ends at once, but for SIGHUP. All end the process normally, so
that everything that was started is stopped.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import math
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from paceline.api.http.admission import GRACE_S, AdmissionControl, Doors, Visitor
from paceline.api.http.logs import quieten
from paceline.errors import ConfigError
from paceline.runtime.link.transport import CONNECTION, UVICORN_LINK_OPTIONS
from paceline.system import raise_open_files, trim_heap, user_id

# ---- the user behind a connection from this machine, as the kernel knows it ------------------------------------------
# A server on a loopback address can be reached by every user of the machine. On Linux the owner of a socket is asked
# of `sock_diag` (netlink), which needs no privileges; on other systems, and where netlink is barred, owners are
# unknown.
Address = tuple[str, int | None]  # an IP address and a port; without one for a socket that has none

ROOT = 0

_SOCK_DIAG, _BY_FAMILY, _ERROR, _REQUEST = 4, 20, 2, 1  # linux/netlink.h, linux/sock_diag.h
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ASKED = struct.Struct("=BBBBI")  # inet_diag_req_v2: family, protocol, extensions, padding, states
_ID = struct.Struct("!HH16s16s")  # inet_diag_sockid: ports and addresses of both ends
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # of any interface, without a cookie
_OWNER = struct.Struct("=II")  # inet_diag_msg: user, inode
_OWNER_AT = _HEADER.size + 4 + _ID.size + len(_ANY) + 12


def is_own_user(client: Address | None, server: Address | None) -> bool:
    """True if the client's end of a TCP connection belongs to this program's user or to root.

    True also where the system cannot tell (`can_tell`). False for an end whose process has closed it.
    """
    if client is None or server is None or not can_tell():
        return True
    owner = user_of(client, server)
    return owner is not None and owner in _welcome()


@functools.cache
def can_tell() -> bool:
    """True if the owner of a connection can be found here. Tried once, with a connection of this program to itself."""
    for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):  # one may be missing
        try:
            with (
                socket.create_server((loopback, 0), family=family) as server,
                socket.create_connection(server.getsockname()[:2]) as client,
            ):
                return user_of(client.getsockname()[:2], client.getpeername()[:2]) == user_id()
        except (AttributeError, OSError):  # AttributeError: no netlink on this system
            continue
    return False


def user_of(near: Address, far: Address) -> int | None:
    """Id of the user whose process holds this end of a TCP connection; None if none does. Raises OSError where the
    kernel does not answer."""
    family = socket.AF_INET6 if ":" in near[0] else socket.AF_INET
    ends = [socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0") for address, _ in (near, far)]
    body = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + _ID.pack(near[1] or 0, far[1] or 0, *ends) + _ANY
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)  # it answers at once
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
        answer = kernel.recv(4096)
    if len(answer) < _OWNER_AT + _OWNER.size or _HEADER.unpack_from(answer)[1] == _ERROR:
        return None
    user, inode = _OWNER.unpack_from(answer, _OWNER_AT)
    return int(user) if inode else None  # without an inode it is closed, and the user says nothing


def _welcome() -> set[int]:
    return {user_id(), ROOT}


# ---- HTTP connections, counted at the doors, with a time limit on each request's head and on each stranger -----------
# uvicorn limits the time between two requests only, up to the first byte of the next: a client that connects and sends
# nothing, or one byte a minute, would keep its connection for ever; so would one that does not read its answer.
HEAD_S = 5.0  # for a whole head; browsers open connections in advance, and replace them when they are closed
STRANGER_S = 15.0  # for a whole request of a stranger, answer included: its body has less (`admission.OPEN_BODY_S`)
READ_S = 60.0  # without reading 64 KiB, or all, of the answer that is buffered
_READ = 1 << 16  # bytes


class HttpConnection(H11Protocol):
    """Breaks the connection when no request is being answered and the next head takes more than `head_s`, when a
    stranger's request takes more than `stranger_s`, or when the client does not read: `READ_S`, of whatever answer.

    The limit on a body is in `body`. Between an answer to a known sender and the first byte of the next request
    uvicorn's `timeout_keep_alive` applies. The rest of a body after its answer counts as the next head.
    """

    head_s = HEAD_S
    stranger_s = STRANGER_S
    read_s = READ_S

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        doors: Doors,
        max_connections: int,
    ) -> None:
        """max_connections: beyond it a new one is broken unread."""
        super().__init__(config, server_state, dict(app_state), _loop)
        self._doors = doors
        self._max_connections = max_connections
        self._visitor: Visitor | None = None  # while the connection is open
        self._deadline: asyncio.TimerHandle | None = None
        self._timed: RequestResponseCycle | None = None  # the request that the deadline is for; None: for a head
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        own_user = partial(is_own_user, self.client, self.server)
        self._visitor = Visitor(self._doors, self.client[0] if self.client else "", transport.abort, own_user)
        self.app_state[CONNECTION] = self._visitor
        if len(self.connections) > self._max_connections:
            transport.abort()
            return
        self._limit(self.head_s)
        self.loop.call_later(GRACE_S, self._linger, self._visitor)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._cancel_unread()
        if self._visitor is not None:
            self._visitor.gone()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_unread(math.inf)

    def resume_writing(self) -> None:
        self._cancel_unread()
        super().resume_writing()

    def _look_unread(self, before: float) -> None:
        left = self.transport.get_write_buffer_size()
        if left > before - _READ:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.read_s, self._look_unread, left)

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is not self or self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self._timed is not self.cycle:
                self._timed = self.cycle
                self._limit(self.stranger_s)
        elif self._deadline is None:
            self._limit(self.head_s)

    def on_response_complete(self) -> None:
        self._cancel_deadline()
        if self._visitor is not None and not self._visitor.known:
            self._limit(self.head_s)  # sooner than `timeout_keep_alive`
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._cancel_deadline()  # a WebSocket has its own limits, and the end of its route is its visitor's
        super().handle_websocket_upgrade(event)

    def _linger(self, visitor: Visitor) -> None:
        # A request that has come in this turn of the loop is identified in the next.
        self.loop.call_soon(visitor.linger)

    def _overdue(self) -> None:
        self._deadline = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._visitor is not None and self._visitor.known:
            return  # an answer may take its time
        self.transport.abort()

    def _limit(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self._overdue)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@contextmanager
def freeze_heap() -> Iterator[None]:
    """Freeze the heap after start-up so that garbage collection skips long-lived objects (modules, models, stores),
    and give back what the start has freed.

    A full collection takes a few hundred milliseconds and delays every answer; with a frozen heap, a few. One use per
    process at a time.
    """
    gc.collect()
    trim_heap()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


DRAIN_S = 30.0  # for answers to end after the first signal
CLOSE_S = 3  # for connections to close after that
BACKLOG = 512
MAX_CONNECTIONS = 2048  # idle ones included; beyond it uvicorn answers 503 itself, some more are broken unread
MAX_FILES = 2 * MAX_CONNECTIONS  # open files: sockets, and those of the stores
MAX_HEADERS = 32 * 1024  # bytes; h11's default is 16 KiB, browsers with many cookies send more
KEEP_ALIVE_S = 30  # an idle connection; OpenAI's clients drop theirs after 5

_log = logging.getLogger("paceline.api")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, on the first of the host's addresses that this machine has; port 0: any free port. Raises
    ConfigError when none can be used."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {host}: {error.strerror}. Is the address one of this machine?") from None
    for family, kind, protocol, _, address in found:
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError:
            continue  # the system is without this family
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                advice = (
                    "Ports below 1024 are the administrator's: choose another --port."
                    if error.errno == errno.EACCES
                    else "Stop what uses it, or choose another --port."
                )
                raise ConfigError(f"Cannot listen on {host} port {port}: {error.strerror}. {advice}") from None
    raise ConfigError(f"Cannot listen on {host}: this machine has no such address. Give one that it has with --host.")


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
                **UVICORN_LINK_OPTIONS,
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
        async with AsyncExitStack() as ended:  # each in spite of another's fault
            for close in reversed(self._closers):
                ended.push_async_callback(close)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Beside uvicorn's: the end of the terminal, where it is not ignored (`nohup`)."""
        number = getattr(signal, "SIGHUP", None)  # not on Windows
        with ExitStack() as restored:
            in_main = threading.current_thread() is threading.main_thread()
            if number is not None and in_main and signal.getsignal(number) != signal.SIG_IGN:
                restored.callback(signal.signal, number, signal.signal(number, self._hang_up))
            restored.enter_context(super().capture_signals())
            yield

    def _hang_up(self, *_: object) -> None:
        """Stop, as at a signal. Shell and system may both send it, so a second one ends nothing."""

        def stop() -> None:
            if self._draining is None:
                self.stop()

        if self._loop is not None:
            self._loop.call_soon_threadsafe(stop)

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
            for cut in tuple(self._admission.cuts):
                cut()
        finally:
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
    allowed = raise_open_files(MAX_FILES)
    if allowed is None:
        return MAX_FILES
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
