"""A proxy between agent and server: it keeps what goes over the link, and stops it at a message of a test's choice.

It sees what somebody in between without TLS would. It forwards a given number of the device's messages and holds the
next one, so that a test can stop two real processes there, however fast or busy the machine is: the server cannot
receive a message before it is let through.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

CONTROL = 8  # opcodes of WebSocket frames from here on are pings, pongs and closes (RFC 6455, 5.2)
CHUNK = 65536


class Turnstile:
    """Messages of the link are kept in `up` and `down`, unmasked; HTTP, such as enrolment, in `http`."""

    def __init__(self, server: str) -> None:
        """server: base URL of the server."""
        self.up: list[bytes] = []  # from the device
        self.down: list[bytes] = []
        self.http: list[bytes] = []
        self._server = urlsplit(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._gate = threading.Condition()
        self._left: int | None = None  # messages that may still pass; None: all
        self._cuts = 0
        self._sockets: list[socket.socket] = []
        self.held = threading.Event()  # set while a message waits
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def everything(self) -> list[bytes]:
        return [*self.up, *self.down, *self.http]

    def let(self, messages: int | None) -> None:
        """Let this many more messages pass; None: all."""
        with self._gate:
            self._left = messages
            self.held.clear()
            self._gate.notify_all()

    def cut(self) -> None:
        """Close the open connections, dropping held messages. New connections pass everything."""
        with self._gate:
            self._cuts += 1
        self.let(None)

    def close(self) -> None:
        self.cut()
        _end(self._listener, *self._sockets)
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                device, _ = self._listener.accept()
                self._sockets.append(device)
                try:
                    server = socket.create_connection((self._server.hostname or "", self._server.port or 80))
                except OSError:  # the server is down
                    device.close()
                    continue
                self._sockets.append(server)
                for way in ((device, server, self.up, self._pass), (server, device, self.down, lambda _: None)):
                    threading.Thread(target=self._forward, args=way, daemon=True).start()

    def _forward(
        self, source: socket.socket, sink: socket.socket, kept: list[bytes], gate: Callable[[int], None]
    ) -> None:
        cuts = self._cuts
        with suppress(OSError, EOFError), source.makefile("rb") as stream:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += _some(stream.readline())
            self.http.append(head)
            sink.sendall(head)
            if b"upgrade: websocket" in head.lower():
                for frame, opcode, payload in _frames(stream.read):
                    if opcode < CONTROL:
                        gate(cuts)
                        kept.append(payload)
                    sink.sendall(frame)
            while data := stream.read1(CHUNK):  # no WebSocket
                self.http.append(data)
                sink.sendall(data)
        _end(source, sink)

    def _pass(self, cuts: int) -> None:
        with self._gate:
            while self._left == 0 and cuts == self._cuts:
                self.held.set()
                self._gate.wait()
            if cuts != self._cuts:
                raise EOFError
            if self._left is not None:
                self._left -= 1


def _end(*ends: socket.socket) -> None:
    for each in ends:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _some(data: bytes) -> bytes:
    if not data:
        raise EOFError
    return data


def _frames(read: Callable[[int], bytes]) -> Iterator[tuple[bytes, int, bytes]]:
    """Complete frames, each with its opcode and its payload (RFC 6455, 5.2)."""
    while True:
        frame = _some(read(2))
        length, masked = frame[1] & 0x7F, frame[1] & 0x80
        if length >= 126:
            extended = _some(read(2 if length == 126 else 8))
            frame, length = frame + extended, int.from_bytes(extended)
        mask = _some(read(4)) if masked else bytes(4)
        data = _some(read(length)) if length else b""
        if len(data) < length:
            raise EOFError
        repeated = (mask * (length // 4 + 1))[:length]
        payload = (int.from_bytes(data) ^ int.from_bytes(repeated)).to_bytes(length)
        yield frame + (mask if masked else b"") + data, frame[0] & 0x0F, payload


@contextmanager
def turnstile(server: str) -> Iterator[Turnstile]:
    proxy = Turnstile(server)
    try:
        yield proxy
    finally:
        proxy.close()
