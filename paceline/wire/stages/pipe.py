"""One connection of a pipeline as a machine: bytes in and out, messages and bulk messages between them. Pure.

A frame is its length in four bytes, a byte of its kind, and its content. A bulk message is a header with the number of
its bytes, then chunks; it gives way to messages after each chunk, so that none waits behind it. The receiver grants
credit in bytes: what it has not taken is bounded by the message it waits for and one window, and a sender without
credit waits, while messages go on. Bulk messages of one direction come one after the other, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.fields import Frame
from paceline.wire.stages.messages import MAX_MESSAGE_BYTES, Codec

WINDOW_BYTES = 1 << 22
CHUNK_BYTES = 1 << 16
MAX_BULK_BYTES = 1 << 30

LENGTH_BYTES = 4
_MESSAGE, _BULK, _CHUNK, _CREDIT = range(4)
_SIZE_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Bulk:
    """A bulk message that has come as a whole."""

    header: Frame
    payload: bytes | bytearray


@dataclass(slots=True, eq=False)
class _Incoming:
    header: Frame
    size: int
    payload: bytearray
    owed: int = 0  # bytes that have come and are not granted again yet


class Pipe:
    """One end. `messages` and `headers`: what the other end may send.

    window: bytes of bulk messages that the other end may send ahead; both ends must have the same.
    """

    def __init__(
        self,
        messages: Codec,
        headers: Codec | None = None,
        *,
        window: int = WINDOW_BYTES,
        max_bulk: int = MAX_BULK_BYTES,
        max_message: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._messages, self._headers = messages, headers
        self._window, self._max_bulk, self._max_message = window, max_bulk, max_message
        self._out: deque[bytes] = deque()  # messages and grants
        self._bulk: deque[tuple[bytes | None, memoryview]] = deque()  # (header, not sent yet; bytes left)
        self._credit = window
        self._buffer = bytearray()
        self._incoming: deque[_Incoming] = deque()  # oldest first; the last one may not have come as a whole
        self._granted = window  # bytes that the other end may still send
        self._unsent_grant = 0
        self.pending_bulk = 0  # bytes of bulk messages to be sent

    # ---- sending ----------------------------------------------------------------------------------------------------
    def send(self, message: Frame) -> None:
        """Raises LocalProtocolError for a message that is too large."""
        data = Codec.encode(message)
        if len(data) > self._max_message:
            raise LocalProtocolError(f"a {type(message).__name__} has {len(data)} bytes")
        self._out.append(_frame(_MESSAGE, data))

    def send_bulk(self, header: Frame, payload: bytes | bytearray | memoryview) -> None:
        """payload: must not be changed any more. Raises LocalProtocolError for one that is too large."""
        if len(payload) > self._max_bulk:
            raise LocalProtocolError(f"a bulk message of {len(payload)} bytes")
        content = len(payload).to_bytes(_SIZE_BYTES, "big") + Codec.encode(header)
        self._bulk.append((_frame(_BULK, content), memoryview(payload).cast("B")))
        self.pending_bulk += len(payload)

    def next_frame(self) -> bytes | None:
        """What to write next; None while there is nothing, or no credit. Messages first."""
        if self._out:
            return self._out.popleft()
        if not self._bulk:
            return None
        header, left = self._bulk[0]
        if header is not None:
            if left:
                self._bulk[0] = (None, left)
            else:
                self._bulk.popleft()
            return header
        count = min(len(left), CHUNK_BYTES, self._credit)
        if not count:
            return None
        self._credit -= count
        self.pending_bulk -= count
        if count == len(left):
            self._bulk.popleft()
        else:
            self._bulk[0] = (None, left[count:])
        return _frame(_CHUNK, left[:count])

    # ---- receiving --------------------------------------------------------------------------------------------------
    def received(self, data: bytes) -> list[Frame | Bulk]:
        """What has come as a whole, in order; bytes may be cut anywhere. Raises RemoteProtocolError."""
        self._buffer += data
        found: list[Frame | Bulk] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "big")
            if not 1 <= size <= self._max_message + _SIZE_BYTES + 1:
                raise _bad(f"a frame of {size} bytes", CloseCode.TOO_LARGE)
            stop = start + LENGTH_BYTES + size
            if len(self._buffer) < stop:
                break
            kind = self._buffer[start + LENGTH_BYTES]
            found += self._frame(kind, bytes(self._buffer[start + LENGTH_BYTES + 1 : stop]))
            start = stop
        del self._buffer[:start]
        return found

    @property
    def missing(self) -> int:
        """Bytes without which no frame is complete: a reader of so many reads nothing behind the frame."""
        if len(self._buffer) < LENGTH_BYTES:
            return LENGTH_BYTES - len(self._buffer)
        return LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "big") - len(self._buffer)

    def taken(self) -> None:
        """The oldest bulk message that has come as a whole has been taken: grant what came behind it."""
        self._incoming.popleft()
        if self._incoming:
            self._grant(self._incoming[0].owed)
            self._incoming[0].owed = 0

    def _frame(self, kind: int, content: bytes) -> list[Frame | Bulk]:
        if kind == _MESSAGE:
            return [self._messages.decode(content)]
        if kind == _BULK:
            return self._begin(content)
        if kind == _CHUNK:
            return self._chunk(content)
        if kind == _CREDIT and len(content) == _SIZE_BYTES:
            self._credit += int.from_bytes(content, "big")
            if self._credit > self._window:
                raise _bad("more credit than one window")
            return []
        raise _bad(f"a frame of kind {kind} with {len(content)} bytes")

    def _begin(self, content: bytes) -> list[Frame | Bulk]:
        if self._headers is None or len(content) < _SIZE_BYTES:
            raise _bad("a bulk message where none may come")
        size = int.from_bytes(content[:_SIZE_BYTES], "big")
        if size > self._max_bulk:
            raise _bad(f"a bulk message of {size} bytes", CloseCode.TOO_LARGE)
        if self._open() is not None:
            raise _bad("a bulk message within another")
        if len(self._incoming) >= MAX_WAITING:
            raise _bad("too many bulk messages that nobody has taken", CloseCode.TOO_LARGE)
        self._incoming.append(_Incoming(self._headers.decode(content[_SIZE_BYTES:]), size, bytearray()))
        return self._whole()

    def _chunk(self, content: bytes) -> list[Frame | Bulk]:
        message = self._open()
        if message is None or len(message.payload) + len(content) > message.size:
            raise _bad("a chunk of no bulk message")
        if len(content) > self._granted:
            raise _bad("a bulk message beyond its credit")
        self._granted -= len(content)
        message.payload += content
        if message is self._incoming[0]:  # it is waited for
            self._grant(len(content))
        else:
            message.owed += len(content)
        return self._whole()

    def _whole(self) -> list[Frame | Bulk]:
        message = self._incoming[-1]
        return [Bulk(message.header, message.payload)] if len(message.payload) == message.size else []

    def _open(self) -> _Incoming | None:
        """The bulk message that has not come as a whole."""
        if not self._incoming or len(self._incoming[-1].payload) == self._incoming[-1].size:
            return None
        return self._incoming[-1]

    def _grant(self, count: int) -> None:
        """In few frames: three quarters of a window are always granted or on their way."""
        self._unsent_grant += count
        if self._unsent_grant >= max(1, self._window // 4):
            self._granted += self._unsent_grant
            self._out.append(_frame(_CREDIT, self._unsent_grant.to_bytes(_SIZE_BYTES, "big")))
            self._unsent_grant = 0


MAX_WAITING = 1 << 12  # bulk messages that have come and nobody has taken, whatever their size


def _frame(kind: int, content: bytes | memoryview) -> bytes:
    return b"".join(((len(content) + 1).to_bytes(LENGTH_BYTES, "big"), bytes((kind,)), content))


def _bad(what: str, code: CloseCode = CloseCode.BAD_FRAME) -> RemoteProtocolError:
    return RemoteProtocolError(what, close_code=code)
