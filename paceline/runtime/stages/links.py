"""Links to stages: TLS with a certificate made at the start, whose fingerprint the handshake's signatures cover.

Nobody issues certificates and none is stored: who the other end is, is proved by Ed25519 keys.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import ssl
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from paceline.errors import LinkClosed, RemoteProtocolError
from paceline.runtime.identity import dialling_handshake
from paceline.runtime.link.connection import Authenticator, PeerLink
from paceline.runtime.link.transport import BUFFERED_BYTES, StreamTransport
from paceline.wire.close_codes import FATAL, CloseCode
from paceline.wire.codec import encode
from paceline.wire.effects import Bulk, Signer
from paceline.wire.identity import DiallerHandshake
from paceline.wire.messages import Frame
from paceline.wire.stages.link import StageMachine, bulk_header
from paceline.wire.stages.messages import MAX_MESSAGE_BYTES, BulkHeader, Credit

log = logging.getLogger("paceline.stages")

ROOM_S = 0.5  # between looks at a link that has no room
OPEN_S = 5.0  # for a connection and its TLS
_DAYS = 36_500

Purpose = Literal["head", "rows"]  # what a stage is dialled for: by its head, or by the stage before
Received = Callable[["StageLink", Frame | Bulk], None]
Changed = Callable[["StageLink"], None]


class StageLink(PeerLink):
    """A connection of a head and a stage, or of two neighbouring stages.

    `send`, `send_bulk`, `wait_room` and `taken` may be called on any thread; what comes is passed on in order, on the
    loop. Whatever `received` raises ends the link, because what it was told is lost.
    """

    def __init__(
        self,
        transport: StreamTransport,
        machine: StageMachine,
        authenticate: Authenticator,
        *,
        received: Received,
        on_up: Changed | None = None,
        on_down: Changed | None = None,
    ) -> None:
        """on_down: called once, after the link was up."""
        super().__init__(transport, machine, authenticate)
        self.settled = asyncio.Event()  # it is up, or will never be
        self._machine, self._stream = machine, transport
        self._received, self._on_up, self._on_down = received, on_up, on_down
        self._loop = asyncio.get_running_loop()
        self._room = threading.Condition()
        self._unsent = 0  # bytes of bulk messages
        self._acts: deque[Callable[[], None]] = deque()  # to be done on the loop
        self._is_woken = False

    # ---- on any thread ----------------------------------------------------------------------------------------------
    def send(self, message: Frame) -> None:
        """Without effect on a closed link. Raises LocalProtocolError for a message that is too large."""
        self._soon(partial(self._queue, encode(message)))

    def send_bulk(self, header: BulkHeader, payload: bytes | bytearray | memoryview) -> None:
        """payload: must not be changed any more. Raises as `send` does."""
        frame = bulk_header(header, payload)
        with self._room:
            self._unsent += len(payload)
        self._soon(partial(self._queue_bulk, frame, payload))

    def wait_room(self, limit: int) -> None:
        """Wait until no more than `limit` bytes of bulk messages are unsent, or the link is closed. Not on the loop."""
        with self._room:
            while self._unsent > limit and self.is_open:
                self._room.wait(ROOM_S)

    def taken(self) -> None:
        """The oldest bulk message has been taken."""
        self._soon(lambda: self._apply(self._machine.taken()))

    @property
    def is_open(self) -> bool:
        return not self.closed.is_set()

    def _soon(self, act: Callable[[], None]) -> None:
        """On the loop, in order; it is woken once for all that waits."""
        self._acts.append(act)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop has ended, and the link with it
                self._loop.call_soon_threadsafe(self._act)

    # ---- on the loop ------------------------------------------------------------------------------------------------
    def _act(self) -> None:
        self._is_woken = False  # before the last look, so that nothing is left
        while self._acts:
            self._acts.popleft()()

    @property
    def silence_s(self) -> float:
        """Seconds since the other end was heard."""
        return self._loop.time() - self._machine.heard_at

    @property
    def purpose(self) -> str:
        """What it was dialled for."""
        return self._machine.handshake.device

    @property
    def stage(self) -> tuple[str, bytes]:
        """At who has dialled: name and public key of the stage."""
        hand = self._machine.handshake
        assert isinstance(hand, DiallerHandshake)
        return hand.server, hand.server_key

    @property
    def reason(self) -> str:
        """Why it has ended, as a part of a sentence."""
        return (self.close_reason or "").rstrip(".")

    @property
    def is_closed_by_peer(self) -> bool:
        return self._disconnected is not None and self._disconnected.by_peer

    def start(self) -> None:
        """Run, in a task of its own."""
        self._task = self._loop.create_task(self.run())

    def break_off(self, reason: str = "", code: CloseCode = CloseCode.CLOSING) -> None:
        """Close, without waiting for the end."""
        self._apply(self._machine.close(code, reason))

    def _queue_bulk(self, header: bytes, payload: bytes | bytearray | memoryview) -> None:
        self._machine.send_bulk(header, payload)
        self._wake_writer.set()

    def _next_frame(self) -> bytes | None:
        if self._outgoing:
            return self._outgoing.popleft()
        if self.closed.is_set() or (found := self._machine.next_frame()) is None:
            return None
        frame, count = found
        self._queued_bytes += len(frame)
        with self._room:
            self._unsent -= count
            self._room.notify_all()
        return frame

    def _idle(self) -> None:
        self._stream.flush()

    def _connected(self) -> None:
        self._stream.max_bytes = MAX_MESSAGE_BYTES
        if self._on_up is not None:
            self._on_up(self)
        self.settled.set()

    def _deliver(self, message: Frame | Bulk) -> None:
        if isinstance(message, Credit):
            self._wake_writer.set()
            return
        try:
            self._received(self, message)
        except RemoteProtocolError as error:
            self._apply(self._machine.close(error.close_code, str(error)))
        except Exception as fault:
            log.exception("a message could not be taken")
            self._apply(self._machine.close(CloseCode.INTERNAL_ERROR, f"a message could not be taken: {fault}"))

    def _ended(self) -> None:
        self.settled.set()
        with self._room:
            self._room.notify_all()
        if self.up.is_set() and self._on_down is not None:
            self._on_down(self)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A listener's context and the certificate that it shows."""

    context: ssl.SSLContext
    shown: bytes

    @staticmethod
    def fresh() -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline stage")])
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))  # clocks differ
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .sign(key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        with tempfile.TemporaryDirectory() as folder:  # of mode 0700; the context reads files only
            file = Path(folder) / "stage.pem"
            private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            file.write_bytes(private + made.public_bytes(Encoding.PEM))
            context.load_cert_chain(file)
        return Certificate(context, made.public_bytes(Encoding.DER))


def dialling_context() -> ssl.SSLContext:
    """Accepts any certificate: the handshake tells whose it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise ValueError(f"{address[:80]!r} is not an address such as 10.0.0.7:8010")
    return host.strip("[]"), int(port)


async def dial_stage(
    address: str,
    key: Signer,
    purpose: Purpose,
    admit: Authenticator,
    *,
    received: Received,
    on_down: Changed | None = None,
) -> StageLink:
    """A link to the stage that listens there, up. admit: the key that proves the stage's claim to its name.

    Raises LinkClosed with a sentence if it cannot be reached, is none of ours, or refuses.
    """
    try:
        host, port = split_address(address)
        async with asyncio.timeout(OPEN_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=dialling_context(), limit=BUFFERED_BYTES)
    except (OSError, TimeoutError, ValueError) as error:
        raise LinkClosed(f"cannot reach a stage at {address}: {str(error) or 'no answer in time'}") from error
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    machine = StageMachine(dialling_handshake(purpose, key, shown))
    link = StageLink(StreamTransport(reader, writer), machine, admit, received=received, on_down=on_down)
    link.start()
    try:
        await link.settled.wait()
    except asyncio.CancelledError:
        link.break_off()
        raise
    if not link.up.is_set():
        what = "is not let in" if link.close_code in FATAL and not link.is_closed_by_peer else "cannot be linked"
        raise LinkClosed(f"the stage at {address} {what}: {link.reason}")
    return link


class Accepted(asyncio.Protocol):
    """A connection that has just been accepted. It is plain and unread, so it can be counted before TLS begins."""

    def __init__(self, arrived: Callable[[asyncio.Transport], None]) -> None:
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what comes is for TLS
        self._arrived(transport)


async def tls_of(transport: asyncio.Transport, certificate: Certificate) -> StreamTransport:
    """TLS on an accepted connection. Raises LinkClosed, the connection broken."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=BUFFERED_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        tls = await loop.start_tls(
            transport, protocol, certificate.context, server_side=True, ssl_handshake_timeout=OPEN_S
        )
    except OSError as error:
        transport.abort()
        raise LinkClosed(str(error) or "no TLS in time") from error
    if tls is None:  # broken meanwhile
        raise LinkClosed("the other end closed the connection")
    protocol.connection_made(tls)
    return StreamTransport(reader, asyncio.StreamWriter(tls, protocol, reader, loop))
