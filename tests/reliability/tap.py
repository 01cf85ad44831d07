"""A proxy between agent and server that keeps what goes over the link, as somebody in between without TLS would."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CONTROL = 8  # opcodes of WebSocket frames from here on are pings, pongs and closes (RFC 6455, 5.2)


@dataclass(slots=True)
class Tap:
    """Messages of the link in both directions, unmasked. HTTP between the two, such as enrolment, is in `http`."""

    url: str
    up: list[bytes] = field(default_factory=list)  # from the device
    down: list[bytes] = field(default_factory=list)
    http: list[bytes] = field(default_factory=list)

    @property
    def everything(self) -> list[bytes]:
        return [*self.up, *self.down, *self.http]


@contextmanager
def tapped(server: str) -> Iterator[Tap]:
    """server: base URL."""
    target = urlsplit(server)
    listener = socket.create_server(("127.0.0.1", 0))
    tap = Tap(f"http://127.0.0.1:{listener.getsockname()[1]}")
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                device, _ = listener.accept()
                sockets.append(device)
                try:
                    cloud = socket.create_connection((target.hostname or "", target.port or 80))
                except OSError:  # the server is down
                    device.close()
                    continue
                sockets.append(cloud)
                start(device, cloud, tap.up)
                start(cloud, device, tap.down)

    def start(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
        threads.append(threading.Thread(target=_forward, args=(source, sink, kept, tap.http)))
        threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield tap
    finally:
        _end(listener)
        accepting.join()
        _end(*sockets)
        for thread in threads:
            thread.join()
        for each in (listener, *sockets):
            each.close()


def _forward(source: socket.socket, sink: socket.socket, kept: list[bytes], http: list[bytes]) -> None:
    with suppress(OSError, EOFError), source.makefile("rb") as stream:

        def read(count: int) -> bytes:
            data = stream.read(count)
            if len(data) < count:
                raise EOFError
            sink.sendall(data)
            return data

        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = stream.readline()
            if not line:
                raise EOFError
            head += line
            sink.sendall(line)
        http.append(head)
        if b"upgrade: websocket" in head.lower():
            _frames(read, kept)
        while data := stream.read1(65536):  # no WebSocket
            http.append(data)
            sink.sendall(data)
    _end(source, sink)


def _end(*ends: socket.socket) -> None:
    for each in ends:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _frames(read: Callable[[int], bytes], kept: list[bytes]) -> None:
    """Keep the payload of each frame, until the connection ends."""
    while True:
        first, second = read(2)
        length = second & 0x7F
        if length >= 126:
            length = int.from_bytes(read(2 if length == 126 else 8))
        mask = read(4) if second & 0x80 else bytes(4)
        payload = read(length)
        if first & 0x0F < CONTROL:
            repeated = (mask * (length // 4 + 1))[:length]
            kept.append((int.from_bytes(payload) ^ int.from_bytes(repeated)).to_bytes(length))
