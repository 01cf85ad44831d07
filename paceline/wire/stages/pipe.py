"""One connection of a pipeline as a machine: bytes in and out, messages and bulk messages between them. Pure.

A frame is its length in four bytes, a byte of its kind, and its content. A bulk message is a header with the number of
its bytes, then chunks; it gives way to messages after each chunk, so that none waits behind it. The receiver grants
credit in bytes: what it has not taken is bounded by the message it waits for and one window, and a sender without
credit waits, while messages go on. Bulk messages of one direction come one after the other, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from paceline.errors import LocalProtocolError
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Signer, Verify, signed_bytes
from paceline.wire.messages import Frame
from paceline.wire.stages.messages import (
    MAX_MESSAGE_BYTES,
    STAGE_VERSION,
    Codec,
    StageChallenge,
    StageHello,
    StageProof,
    bad_frame,
)

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
                raise bad_frame(f"a frame of {size} bytes", CloseCode.TOO_LARGE)
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
                raise bad_frame("more credit than one window")
            return []
        raise bad_frame(f"a frame of kind {kind} with {len(content)} bytes")

    def _begin(self, content: bytes) -> list[Frame | Bulk]:
        if self._headers is None or len(content) < _SIZE_BYTES:
            raise bad_frame("a bulk message where none may come")
        size = int.from_bytes(content[:_SIZE_BYTES], "big")
        if size > self._max_bulk:
            raise bad_frame(f"a bulk message of {size} bytes", CloseCode.TOO_LARGE)
        if self._open() is not None:
            raise bad_frame("a bulk message within another")
        if len(self._incoming) >= MAX_WAITING:
            raise bad_frame("too many bulk messages that nobody has taken", CloseCode.TOO_LARGE)
        self._incoming.append(_Incoming(self._headers.decode(content[_SIZE_BYTES:]), size, bytearray()))
        return self._whole()

    def _chunk(self, content: bytes) -> list[Frame | Bulk]:
        message = self._open()
        if message is None or len(message.payload) + len(content) > message.size:
            raise bad_frame("a chunk of no bulk message")
        if len(content) > self._granted:
            raise bad_frame("a bulk message beyond its credit")
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


# Handshake of a connection to a stage: each end proves its Ed25519 key over both nonces. Pure; signing is passed in.
#
#     dialler: head, or stage before          listening stage
#       StageHello      key, nonce        ->
#                                         <-    StageChallenge  name, nonce, signature
#       StageProof      signature         ->
#
# Every signature covers the frames before it, a purpose of its own, and the binding: the fingerprint of the
# certificate that the listener showed in TLS. So whoever passes these frames on between two connections of his own is
# found out, and what follows is as secret as TLS makes it, without certificates that anybody issues. The head knows
# the stage's key by its name; a stage knows the head's, because it pinned it when it enrolled; the head tells
# neighbours each other's keys. A handshake object serves one connection: its nonce must be fresh.


CHALLENGE, PROOF = "stage challenge", "stage dialler"  # purposes

Purpose = Literal["head", "rows"]


class DiallerHandshake:
    """The end of the head, or of the stage before."""

    def __init__(self, key: Signer, purpose: Purpose, *, nonce: bytes, binding: bytes, verify: Verify) -> None:
        self._key = key
        self._verify = verify
        self._binding = binding
        self.hello = StageHello(STAGE_VERSION, purpose, key.public_key, nonce)

    def challenged(self, challenge: StageChallenge) -> Claim:
        """The stage's claim to its name, to be checked before `prove`. Raises RemoteProtocolError."""
        if challenge.version != STAGE_VERSION:
            what = f"this end speaks {STAGE_VERSION}, the stage {challenge.version}"
            raise bad_frame(what, CloseCode.VERSION_MISMATCH)
        signed = _challenge_bytes(self._binding, self.hello, challenge.name, challenge.nonce)
        return Claim(challenge.name, (challenge.signature,), signed, self._verify)

    def prove(self, challenge: StageChallenge) -> StageProof:
        return StageProof(self._key.sign(_proof_bytes(self._binding, self.hello, challenge)))


class ListenerHandshake:
    """The stage's end."""

    def __init__(self, key: Signer, name: str, *, nonce: bytes, binding: bytes, verify: Verify) -> None:
        self._key, self._name, self._nonce = key, name, nonce
        self._binding = binding
        self._verify = verify
        self._hello: StageHello | None = None
        self._challenge: StageChallenge | None = None

    def greeted(self, hello: StageHello) -> StageChallenge:
        """Raises RemoteProtocolError for another version."""
        if hello.version != STAGE_VERSION:
            what = f"this stage speaks {STAGE_VERSION}, the other end {hello.version}"
            raise bad_frame(what, CloseCode.VERSION_MISMATCH)
        signature = self._key.sign(_challenge_bytes(self._binding, hello, self._name, self._nonce))
        self._hello = hello
        self._challenge = StageChallenge(STAGE_VERSION, self._name, self._nonce, signature)
        return self._challenge

    def proved(self, proof: StageProof) -> bool:
        """The dialler holds the key that it named. Whether that key may dial is the caller's to know."""
        if self._hello is None or self._challenge is None:
            return False
        signed = _proof_bytes(self._binding, self._hello, self._challenge)
        return self._verify(self._hello.key, proof.signature, signed)


def _challenge_bytes(binding: bytes, hello: StageHello, name: str, nonce: bytes) -> bytes:
    return signed_bytes(CHALLENGE, binding, Codec.encode(hello), name.encode(), nonce)


def _proof_bytes(binding: bytes, hello: StageHello, challenge: StageChallenge) -> bytes:
    return signed_bytes(PROOF, binding, Codec.encode(hello), Codec.encode(challenge))
