"""One connection of a pipeline: the machine `wire.stages.pipe.Pipe` on a TLS connection, with a heartbeat.

`send` and `send_bulk` may be called on any thread; what comes is passed on in order, on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from paceline.core.printable import printable
from paceline.errors import LinkClosed, RemoteProtocolError
from paceline.wire.fields import Frame
from paceline.wire.stages.messages import StagePing
from paceline.wire.stages.pipe import Bulk, Pipe

log = logging.getLogger("paceline.stages")

HEARTBEAT_S = 1.0
QUIET_S = 2.5  # two heartbeats have not come
SILENCE_S = 4.0  # nothing heard for so long: the other end, or the network, is gone
READ_BYTES = 1 << 18
WRITE_BYTES = 1 << 18  # written before the loop turns to anything else
ROOM_S = 0.5  # between looks at a channel that has no room


class Channel:
    """Belongs to the loop on which it is made."""

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
