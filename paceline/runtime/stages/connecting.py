"""Connections to stages: TLS with a certificate made at the start, whose fingerprint the handshake's signatures cover.

Nobody issues certificates and none is stored: who the other end is, is proved by Ed25519 keys.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import logging
import secrets
import ssl
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from paceline.core.printable import printable
from paceline.errors import LinkClosed, RemoteProtocolError
from paceline.runtime.identity import verify
from paceline.wire.close_codes import CloseCode, sentence
from paceline.wire.effects import Claim, Signer
from paceline.wire.messages import NONCE_BYTES, Frame
from paceline.wire.stages.messages import Codec, Refused, RequestDone, StageChallenge, StageHello, StagePing, StageProof
from paceline.wire.stages.pipe import LENGTH_BYTES, Bulk, DiallerHandshake, ListenerHandshake, Pipe, Purpose

log = logging.getLogger("paceline.stages")

HEARTBEAT_S = 1.0
QUIET_S = 2.5  # two heartbeats have not come
SILENCE_S = 4.0  # nothing heard for so long: the other end, or the network, is gone
READ_BYTES = 1 << 18
WRITE_BYTES = 1 << 18  # written before the loop turns to anything else
ROOM_S = 0.5  # between looks at a channel that has no room


class Channel:
    """One connection of a pipeline: the machine `wire.stages.pipe.Pipe` on a TLS connection, with a heartbeat.

    Belongs to the loop on which it is made. `send` and `send_bulk` may be called on any thread; what comes is passed on
    in order, on the loop.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pipe: Pipe) -> None:
        self.closed = False
        self.reason = ""  # why it has ended
        self.is_mute = False  # it has ended because nothing was heard
        self._reader, self._writer, self._pipe = reader, writer, pipe
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of the pipe
        self._room = threading.Condition(self._lock)
        self._wake = asyncio.Event()
        self._heard = self._loop.time()
        self._task: asyncio.Task[None] | None = None

    # ---- on any thread ----------------------------------------------------------------------------------------------
    def send(self, message: Frame) -> None:
        """Without effect on a closed channel. Raises LocalProtocolError for a message that is too large."""
        with self._lock:
            self._pipe.send(message)
        self._wake_up()

    def send_bulk(self, header: Frame, payload: bytes | bytearray | memoryview) -> None:
        with self._lock:
            self._pipe.send_bulk(header, payload)
        self._wake_up()

    def wait_room(self, limit: int) -> None:
        """Wait until no more than `limit` bytes of bulk messages are unsent, or the channel is closed. Not on the
        loop."""
        with self._room:
            while self._pipe.pending_bulk > limit and not self.closed:
                self._room.wait(ROOM_S)

    def taken(self) -> None:
        """The oldest bulk message has been taken."""
        with self._lock:
            self._pipe.taken()
        self._wake_up()

    def _wake_up(self) -> None:
        if not self.closed:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop has ended
                self.closed = True

    # ---- on the loop ------------------------------------------------------------------------------------------------
    @property
    def silence_s(self) -> float:
        """Seconds since the other end was heard."""
        return self._loop.time() - self._heard

    @property
    def is_alive(self) -> bool:
        return not self.closed and self.silence_s < QUIET_S

    async def run(self, received: Callable[[Frame | Bulk], None]) -> str:
        """Until the connection ends; return why, in words. `received` may raise RemoteProtocolError; anything else that
        it raises ends the connection too, because what it was told is lost."""
        self._heard = self._loop.time()
        jobs = [asyncio.create_task(job) for job in (self._read(received), self._write(), self._beat())]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            fault = first.exception()
            if fault is not None:
                log.error("a message could not be taken", exc_info=fault)
            self.reason = self.reason or (first.result() if fault is None else f"a message could not be taken: {fault}")
        finally:
            self.close()
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        return self.reason

    def close(self, reason: str = "closed here") -> None:
        """Break the connection."""
        if not self.closed:
            self.reason = self.reason or reason
            self.closed = True
            self._writer.transport.abort()
        with self._room:
            self._room.notify_all()

    async def _read(self, received: Callable[[Frame | Bulk], None]) -> str:
        try:
            while data := await self._reader.read(READ_BYTES):
                self._heard = self._loop.time()
                with self._lock:
                    found = self._pipe.received(data)
                self._wake.set()  # there may be credit
                for message in found:
                    if not isinstance(message, StagePing):
                        received(message)
        except RemoteProtocolError as error:
            return f"the other end broke the protocol: {printable(str(error))}"
        except (OSError, LinkClosed) as error:
            return f"the connection broke: {error}"
        return "the other end closed the connection"

    async def _write(self) -> str:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while frames := self._frames():
                    self._writer.write(frames)
                    await self._writer.drain()
        except (OSError, RuntimeError) as error:
            return f"the connection broke: {error}"

    def _frames(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        with self._room:
            while size < WRITE_BYTES and (frame := self._pipe.next_frame()) is not None:
                parts.append(frame)
                size += len(frame)
            self._room.notify_all()
        return b"".join(parts)

    async def _beat(self) -> str:
        while True:
            began = self._loop.time()
            await asyncio.sleep(HEARTBEAT_S)
            has_slept = self._loop.time() - began > 2 * HEARTBEAT_S  # this process: what has come is not read yet
            if self.silence_s > SILENCE_S and not has_slept:
                self.is_mute = True
                return f"nothing was heard for {SILENCE_S:.0f} s"
            self.send(StagePing())


OPEN_S = 5.0  # for the connection and its handshake together
MAX_HANDSHAKE_BYTES = 4096
NOT_YOURS = "this key may not dial this stage"
_DAYS = 36_500

_HANDSHAKE = Codec(StageHello, StageChallenge, StageProof, RequestDone, Refused)

M = TypeVar("M", bound=Frame)
Admit = Callable[[Claim], Awaitable[bytes | CloseCode]]  # the stage's public key, or why it is not one of ours
MayDial = Callable[[Purpose, bytes], str | None]  # why the holder of this key may not, in words


@dataclass(frozen=True, slots=True)
class Certificate:
    """A listener's context and the fingerprint of what it shows."""

    context: ssl.SSLContext
    fingerprint: bytes

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
        return Certificate(context, hashlib.sha256(made.public_bytes(Encoding.DER)).digest())


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
    address: str, key: Signer, purpose: Purpose, admit: Admit, pipe: Callable[[], Pipe]
) -> tuple[Channel, str, bytes]:
    """A channel to the stage that listens there, its name and its public key.

    Raises LinkClosed with a sentence if it cannot be reached, is none of ours, or refuses.
    """
    try:
        host, port = split_address(address)
        async with asyncio.timeout(OPEN_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=dialling_context())
    except (OSError, TimeoutError, ValueError) as error:
        raise LinkClosed(f"cannot reach a stage at {address}: {str(error) or 'no answer in time'}") from error
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        hand = DiallerHandshake(key, purpose, nonce=_nonce(), binding=hashlib.sha256(shown).digest(), verify=verify)
        talk = _Talk(reader, writer)
        async with asyncio.timeout(OPEN_S):
            await talk.say(hand.hello)
            challenge = await talk.hear(StageChallenge)
            found = await admit(hand.challenged(challenge))
            if isinstance(found, CloseCode):
                raise LinkClosed(f"the stage at {address} is not let in: {sentence(found, '')}")
            await talk.say(hand.prove(challenge))
            await talk.hear(RequestDone)
    except (OSError, TimeoutError, RemoteProtocolError, LinkClosed) as error:
        writer.transport.abort()
        raise LinkClosed(f"no link to the stage at {address}: {str(error) or 'no answer in time'}") from error
    return Channel(reader, writer, pipe()), challenge.name, found


class Accepted(asyncio.Protocol):
    """A connection that has just been accepted. It is plain and unread, so it can be counted before TLS begins."""

    def __init__(self, arrived: Callable[[asyncio.Transport], None]) -> None:
        self._arrived = arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # what comes is for TLS
        self._arrived(transport)


async def accept(
    transport: asyncio.Transport,
    *,
    key: Signer,
    name: str,
    certificate: Certificate,
    may_dial: MayDial,
    pipe: Callable[[Purpose], Pipe],
) -> tuple[Channel, Purpose]:
    """A channel to whoever has dialled, once it has proved a key that may. Raises LinkClosed, the connection broken."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
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
    writer = asyncio.StreamWriter(tls, protocol, reader, loop)
    hand = ListenerHandshake(key, name, nonce=_nonce(), binding=certificate.fingerprint, verify=verify)
    talk = _Talk(reader, writer)
    try:
        async with asyncio.timeout(OPEN_S):
            hello = await talk.hear(StageHello)
            await talk.say(hand.greeted(hello))
            proof = await talk.hear(StageProof)
            why_not = may_dial(hello.purpose, hello.key) if hand.proved(proof) else NOT_YOURS
            if why_not is not None:
                await talk.say(Refused(why_not))
                raise LinkClosed(f"refused: {why_not}")
            await talk.say(RequestDone(0))
    except (OSError, TimeoutError, RemoteProtocolError, LinkClosed) as error:
        writer.transport.abort()
        raise LinkClosed(str(error) or "no answer in time") from error
    return Channel(reader, writer, pipe(hello.purpose)), hello.purpose


class _Talk:
    """Messages before the channel. Reads no byte behind the frame it waits for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._pipe = Pipe(_HANDSHAKE, max_message=MAX_HANDSHAKE_BYTES)

    async def say(self, message: Frame) -> None:
        self._pipe.send(message)
        frame = self._pipe.next_frame()
        assert frame is not None
        self._writer.write(frame)
        await self._writer.drain()

    async def hear(self, kind: type[M]) -> M:
        found: list[Frame | Bulk] = []
        wanted = LENGTH_BYTES
        try:
            while not found:
                found = self._pipe.received(await self._reader.readexactly(wanted))
                wanted = self._pipe.missing
        except asyncio.IncompleteReadError as error:
            raise LinkClosed("the other end closed the connection") from error
        message = found[0]
        if isinstance(message, Refused):
            raise LinkClosed(f"refused: {printable(message.reason)}")
        if not isinstance(message, kind):
            raise RemoteProtocolError("another message", close_code=CloseCode.UNEXPECTED_MESSAGE)
        return message


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)
