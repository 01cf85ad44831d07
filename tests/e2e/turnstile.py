"""A proxy before a server, which forwards a given number of the device's messages on the link and holds the next one.

A test can thus stop two real processes at a message of its choice, however fast or busy the machine is: the server
cannot receive a message before it is let through.
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
    def __init__(self, server: str) -> None:
        """server: base URL of the server."""
        self._server = urlsplit(server)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._gate = threading.Condition()
        self._left: int | None = None  # messages that may still pass; None: all
        self._cuts = 0
        self._sockets: list[socket.socket] = []
        self.held = threading.Event()  # set while a message waits
        threading.Thread(target=self._accept, daemon=True).start()

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
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                device, _ = self._listener.accept()
                server = socket.create_connection((self._server.hostname or "", self._server.port or 80))
                self._sockets += [device, server]
                threading.Thread(target=self._up, args=(device, server), daemon=True).start()
                threading.Thread(target=self._down, args=(server, device), daemon=True).start()

    def _up(self, device: socket.socket, server: socket.socket) -> None:
        cuts = self._cuts
        with suppress(OSError, EOFError):
            stream = device.makefile("rb")
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += _some(stream.readline())
            server.sendall(head)
            if b"upgrade: websocket" not in head.lower():
                while data := stream.read1(CHUNK):  # no WebSocket
                    server.sendall(data)
                raise EOFError
            for frame, opcode in _frames(stream.read):
                if opcode < CONTROL:
                    self._pass(cuts)
                server.sendall(frame)
        _end(device, server)

    def _down(self, server: socket.socket, device: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(CHUNK):
                device.sendall(data)
        _end(device, server)

    def _pass(self, cuts: int) -> None:
        with self._gate:
            while self._left == 0 and cuts == self._cuts:
                self.held.set()
                self._gate.wait()
            if cuts != self._cuts:
                raise EOFError
            if self._left is not None:
                self._left -= 1


def _end(*both: socket.socket) -> None:
    for each in both:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _some(data: bytes) -> bytes:
    if not data:
        raise EOFError
    return data


def _frames(read: Callable[[int], bytes]) -> Iterator[tuple[bytes, int]]:
    """Complete frames, each with its opcode (RFC 6455, 5.2)."""
    while True:
        frame = _some(read(2))
        length, masked = frame[1] & 0x7F, frame[1] & 0x80
        if length >= 126:
            extended = _some(read(2 if length == 126 else 8))
            frame, length = frame + extended, int.from_bytes(extended)
        rest = length + (4 if masked else 0)
        yield frame + (_some(read(rest)) if rest else b""), frame[0] & 0x0F


@contextmanager
def turnstile(server: str) -> Iterator[Turnstile]:
    proxy = Turnstile(server)
    try:
        yield proxy
    finally:
        proxy.close()
