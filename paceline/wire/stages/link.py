"""The link of a model in stages as a machine: commands, results, and bulk messages between them. Pure.

A bulk message is a header with the number of its bytes, and chunks, the first one in one frame with the header; it
gives way to messages after each chunk, so that none waits behind it. The receiver grants credit in bytes: what it has
not taken is bounded by the message it waits for and one window, and a sender without credit waits, while messages go
on. Bulk messages of one direction come one after the other, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import cast

import msgspec

from paceline.errors import LocalProtocolError
from paceline.wire.close_codes import CloseCode, remote_fault
from paceline.wire.codec import decode_with, encode
from paceline.wire.effects import Bulk, Deliver, Effect, Transmit
from paceline.wire.identity import Handshake
from paceline.wire.link import PeerMachine
from paceline.wire.messages import Challenge, Frame, Hello, Ping, Pong, Proof, Welcome
from paceline.wire.stages import messages
from paceline.wire.stages.messages import MAX_BULK_BYTES, BulkHeader, Credit

WINDOW_BYTES = 1 << 22
CHUNK_BYTES = 1 << 16
CHUNK, BULK_BEGINS = b"\0", b"\2"  # how frames of bulk messages begin; no message does
SIZE_BYTES = 4  # of the header's length, then of the payload's
HEARTBEAT_S = 1.0
MAX_MISSED = 4
MAX_WAITING = 1 << 12  # bulk messages that have come and nobody has taken, whatever their size

FROM_HEAD: tuple[type[Frame], ...] = (
    messages.Describe,
    messages.LoadSpan,
    messages.Assign,
    messages.RunBatch,
    messages.PruneRows,
    messages.TruncateRows,
    messages.ReleaseRows,
    messages.ExportRows,
    messages.ImportRows,
    messages.CheckRows,
    messages.Forget,
    messages.FetchScores,
    messages.SampleRows,
)
FROM_STAGE: tuple[type[Frame], ...] = (
    messages.About,
    messages.RequestDone,
    messages.RequestFailed,
    messages.StageHave,
    messages.NeighbourLost,
    messages.BatchDone,
    messages.SampledRows,
)
BULK: tuple[type[Frame], ...] = (messages.HiddenRows, messages.KvRows, messages.ScoreRows, Credit)
_kinds = reduce(or_, (Hello, Challenge, Proof, Welcome, Ping, Pong, *FROM_HEAD, *FROM_STAGE, *BULK))
_decoder = cast("msgspec.msgpack.Decoder[Frame]", msgspec.msgpack.Decoder(_kinds, dec_hook=messages.array_from_wire))


@dataclass(slots=True, eq=False)
class _Incoming:
    header: BulkHeader
    missing: int  # bytes
    payload: bytearray = field(default_factory=bytearray)
    owed: int = 0  # bytes that have come and are not granted again yet


class StageMachine(PeerMachine):
    """One end of the link of a head and a stage, or of two neighbouring stages.

    Messages are sent by their frames, bulk messages by what `next_frame` returns when no message waits.
    """

    heartbeat_s = HEARTBEAT_S
    max_missed = MAX_MISSED

    def __init__(self, handshake: Handshake, *, window: int = WINDOW_BYTES) -> None:
        """window: bytes of bulk messages that the other end may send ahead; both ends must have the same."""
        super().__init__(handshake)
        self._window = window
        self._bulk: deque[tuple[bytes | None, memoryview]] = deque()  # (header, not sent yet; bytes left)
        self._credit = window
        self._incoming: deque[_Incoming] = deque()  # oldest first; the last one may not have come as a whole
        self._granted = window  # bytes that the other end may still send
        self._unsent_grant = 0

    # ---- sending ----------------------------------------------------------------------------------------------------
    def send_bulk(self, header: bytes, payload: bytes | bytearray | memoryview) -> None:
        """Queue a bulk message, whose header is made by `bulk_header`. payload: must not be changed any more."""
        self._bulk.append((header, memoryview(payload).cast("B")))

    def next_frame(self) -> tuple[bytes, int] | None:
        """The next frame of bulk messages, and the bytes of a payload in it; None while there is none, or no credit."""
        if not self._bulk:
            return None
        header, left = self._bulk[0]
        count = min(len(left), CHUNK_BYTES, self._credit)
        if header is None and not count:
            return None
        self._credit -= count
        if count == len(left):
            self._bulk.popleft()
        else:
            self._bulk[0] = (None, left[count:])
        return b"".join((header or CHUNK, left[:count])), count

    def taken(self) -> list[Effect]:
        """The oldest bulk message that has come as a whole has been taken: grant what came behind it."""
        self._incoming.popleft()
        if not self._incoming:
            return []
        owed, self._incoming[0].owed = self._incoming[0].owed, 0
        return self._grant(owed)

    # ---- receiving --------------------------------------------------------------------------------------------------
    def _receive(self, data: bytes, now: float) -> list[Effect]:
        kind = data[: len(CHUNK)]
        if not self.is_up or kind not in (CHUNK, BULK_BEGINS):
            return super()._receive(data, now)
        start = len(kind) if kind == CHUNK else self._begin(data)
        message = self._incoming[-1] if self._incoming else None
        count = len(data) - start
        if message is None or count > message.missing:
            raise remote_fault("a chunk of no bulk message")
        if count > self._granted:
            raise remote_fault("a bulk message beyond its credit")
        self._granted -= count
        message.missing -= count
        message.payload += memoryview(data)[start:]
        whole: list[Effect] = [] if message.missing else [Deliver(Bulk(message.header, message.payload))]
        if message is self._incoming[0]:  # it is waited for
            return [*self._grant(count), *whole]
        message.owed += count
        return whole

    def _begin(self, data: bytes) -> int:
        """A bulk message, of which nothing has come before; where its first chunk begins."""
        begin = len(BULK_BEGINS) + 2 * SIZE_BYTES
        stop = begin + int.from_bytes(data[len(BULK_BEGINS) : begin - SIZE_BYTES], "big")
        size = int.from_bytes(data[begin - SIZE_BYTES : begin], "big")
        header = self._decode(data[begin:stop])
        if not isinstance(header, BulkHeader) or stop > len(data):
            raise remote_fault("no header of a bulk message")
        if size > MAX_BULK_BYTES:
            raise remote_fault(f"a bulk message of {size} bytes", CloseCode.TOO_LARGE)
        if self._incoming and self._incoming[-1].missing:
            raise remote_fault("a bulk message within another")
        if len(self._incoming) >= MAX_WAITING:
            raise remote_fault("too many bulk messages that nobody has taken", CloseCode.TOO_LARGE)
        self._incoming.append(_Incoming(header, size))
        return stop

    def _decode(self, data: bytes) -> Frame:
        return decode_with(_decoder.decode, data)

    def _heard(self, message: Frame, now: float) -> list[Effect]:  # noqa: ARG002  # as of other links
        match message:
            case Credit(num_bytes=num_bytes):
                self._credit += num_bytes
                if self._credit > self._window:
                    raise remote_fault("more credit than one window")
            case BulkHeader():
                raise remote_fault("a header without its bulk message")
        return [Deliver(message)]

    def _grant(self, count: int) -> list[Effect]:
        """In few frames: three quarters of a window are always granted or on their way."""
        self._unsent_grant += count
        if self._unsent_grant < max(1, self._window // 4):
            return []
        granted, self._unsent_grant = self._unsent_grant, 0
        self._granted += granted
        return [Transmit(encode(Credit(granted)))]


def bulk_header(header: BulkHeader, payload: bytes | bytearray | memoryview) -> bytes:
    """How a bulk message begins, before its first chunk. Raises LocalProtocolError for one that is too large."""
    if len(payload) > MAX_BULK_BYTES:
        raise LocalProtocolError(f"a bulk message of {len(payload)} bytes")
    data = encode(header)
    sizes = (len(each).to_bytes(SIZE_BYTES, "big") for each in (data, payload))
    return b"".join((BULK_BEGINS, *sizes, data))
