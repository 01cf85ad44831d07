"""The link's WebSocket byte by byte: frames that no library sends, and what comes back (RFC 6455)."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.reliability.real_server import UPGRADE, WAIT

TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9
MASK = b"\x11\x22\x33\x44"


def frame(
    opcode: int,
    payload: bytes = b"",
    *,
    final: bool = True,
    reserved: int = 0,
    masked: bool = True,
    announced: int | None = None,
) -> bytes:
    """One frame of a client. announced: a length other than the payload's."""
    size = len(payload) if announced is None else announced
    head = bytes([final << 7 | reserved << 4 | opcode])
    bit = 0x80 if masked else 0
    if size < 126:
        head += bytes([bit | size])
    elif size < 1 << 16:
        head += bytes([bit | 126]) + struct.pack("!H", size)
    else:
        head += bytes([bit | 127]) + struct.pack("!Q", size)
    if not masked:
        return head + payload
    return head + MASK + bytes(byte ^ MASK[i % 4] for i, byte in enumerate(payload))


class RawLink:
    """A connection to `/v1/link` after its upgrade."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, WAIT)
        self.began = time.monotonic()
        self.ended: float | None = None  # s from `began` until the server closed it
        self.code: int | None = None  # of the server's close frame; None without one
        self._received = b""
        self.socket.sendall(UPGRADE)
        while b"\r\n\r\n" not in self._received:
            data = self.socket.recv(65_536)
            assert data, self._received
            self._received += data
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        self.socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send what fits. False once the server has closed the connection."""
        try:
            self.socket.send(data)
        except BlockingIOError:
            return True
        except OSError:
            self._end()
        return self.ended is None

    def read(self) -> None:
        """Take what has come."""
        try:
            data = self.socket.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        while (found := _server_frame(self._received)) is not None:
            opcode, payload, self._received = found
            if opcode == CLOSE and self.code is None:
                self.code = struct.unpack("!H", payload[:2])[0] if len(payload) >= 2 else 1005
        if not data:
            self._end()

    def _end(self) -> None:
        if self.ended is None:
            self.ended = time.monotonic() - self.began


def until_closed(
    links: Sequence[RawLink], dribbled: Sequence[bytes] = (), every: float = 0.05, *, patience: float = WAIT
) -> list[RawLink]:
    """Wait until the server has closed all, or for `patience` s. Returns those that are open still, of which there must
    be none after WAIT. dribbled: for each, what is sent over and over until then, `every` s."""
    more = dict(zip(links, dribbled, strict=bool(dribbled)))
    poll = select.poll()
    waiting = {link.socket.fileno(): link for link in links if link.ended is None}
    for number in waiting:
        poll.register(number, select.POLLIN)
    deadline = time.monotonic() + patience
    while waiting:
        if time.monotonic() >= deadline:
            assert patience < WAIT, f"{len(waiting)} connections are open still"
            break
        found = [number for number, _ in poll.poll((every if more else min(1.0, patience)) * 1000)]
        for number in found:
            waiting[number].read()
        if not found:
            for link in waiting.values():
                link.send(more.get(link, b""))
        for number, link in list(waiting.items()):
            if link.ended is not None:
                poll.unregister(number)
                del waiting[number]
    return [*waiting.values()]


def _server_frame(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Opcode, payload and the rest, of an unmasked frame; None until it is whole."""
    if len(data) < 2:
        return None
    size, begin = data[1] & 0x7F, 2
    if size >= 126:
        begin = 4 if size == 126 else 10
        if len(data) < begin:
            return None
        size = int.from_bytes(data[2:begin], "big")
    if len(data) < begin + size:
        return None
    return data[0] & 0xF, data[begin : begin + size], data[begin + size :]


def broken_frames(rng: random.Random, garbage: bytes) -> bytes:
    """Some frames that no honest client sends. garbage: a message that cannot be decoded."""
    payload = rng.randbytes(rng.choice((0, 1, 40, 126, 3000)))
    ends = (b"\x03", b"\x03\xed", b"\xff\xff", b"\x03\xe8\xc3\x28", b"\0\0")
    broken = (
        rng.randbytes(rng.randrange(1, 400)),
        frame(BINARY, payload, masked=False),
        frame(BINARY, payload, reserved=rng.randrange(1, 8)),
        frame(rng.choice((3, 4, 5, 6, 7, 11, 15)), payload),
        frame(TEXT, b"\xc3\x28" + payload),
        frame(PING, b"x" * 126),
        frame(PING, b"x", final=False),
        frame(0, payload),  # continues nothing
        frame(BINARY, payload, final=False) + frame(BINARY, payload),
        frame(CLOSE, rng.choice(ends)),
        frame(BINARY, announced=rng.choice((1 << 21, 1 << 40, (1 << 64) - 1))),
        frame(TEXT, b'{"t": "hello"}'),
    )
    return rng.choice((*broken, *[frame(BINARY, garbage)] * 2))
