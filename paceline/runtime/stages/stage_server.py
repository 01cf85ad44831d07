"""A stage's process around its worker: accepts its head and the stage before, and dials the stage behind.

One head at a time: another is refused while the first is heard, and takes its place when it is not, since a connection
may be dead without having been noticed. When the head is gone, every sequence is; the weights stay. Connections whose
sender has not proved a key yet are counted, by address and in all, and the oldest cut for one too many.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from functools import partial

import psutil

from paceline.core.addresses import Strangers, counted_address
from paceline.errors import EngineLost, LinkClosed, LocalProtocolError, RemoteProtocolError
from paceline.runtime.identity import PrivateKey
from paceline.runtime.stages.connecting import NOT_YOURS, Accepted, Certificate, Channel, accept, dial_stage
from paceline.runtime.stages.stage_worker import StageWorker
from paceline.system import open_files
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim
from paceline.wire.messages import Frame
from paceline.wire.stages.messages import (
    MAX_SENTENCE,
    About,
    Assign,
    CheckRows,
    Codec,
    Describe,
    ExportRows,
    FetchScores,
    Forget,
    ForkRows,
    HiddenRows,
    ImportRows,
    KvRows,
    LoadSpan,
    NeighbourLost,
    PruneRows,
    ReleaseRows,
    RequestDone,
    RequestFailed,
    RunBatch,
    StageCost,
    StagePing,
    TruncateRows,
)
from paceline.wire.stages.pipe import WINDOW_BYTES, Bulk, Pipe, Purpose
from paceline.wire.stages.sampling import BatchDone, SampleAhead, SampleRows

log = logging.getLogger("paceline.stage")

FROM_HEAD = Codec(
    StagePing,
    Describe,
    LoadSpan,
    Assign,
    RunBatch,
    PruneRows,
    TruncateRows,
    ForkRows,
    ReleaseRows,
    ExportRows,
    ImportRows,
    CheckRows,
    Forget,
    FetchScores,
    SampleAhead,
    SampleRows,
)
KV_HEADERS, HIDDEN_HEADERS, PINGS = Codec(KvRows), Codec(HiddenRows), Codec(StagePing)
DIAL_S = 5.0  # for the stage behind to know who will dial it
DIAL_PAUSE_S = 0.05
STRANGERS_PER_ADDRESS = 128
MAX_STRANGERS = 512  # or half of the files that may be open, if that is less


class StageServer:
    """Belongs to the loop it is made on."""

    def __init__(
        self,
        worker_of: Callable[[StageServer], StageWorker],
        *,
        key: PrivateKey,
        name: str,
        head_key: bytes,
        model: tuple[str, int],
        cost: Callable[[], StageCost] | None = None,
    ) -> None:
        """model: its fingerprint and number of layers. cost: measures what layers cost here, on the worker's thread;
        None: the layers are given."""
        self.worker = worker_of(self)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the device is lost
        self._loop = asyncio.get_running_loop()
        self._key, self._name, self._head_key = key, name, head_key
        self._model = model
        self._measure = cost
        self._cost: StageCost | None = None
        self._certificate = Certificate.fresh()
        self._head: Channel | None = None
        self._before: Channel | None = None
        self._behind: Channel | None = None
        self._previous_key: bytes | None = None
        self._epoch = 0
        self._jobs: set[asyncio.Task[None]] = set()
        files = open_files()
        most = MAX_STRANGERS if files is None else min(MAX_STRANGERS, files // 2)
        self.strangers: Strangers[asyncio.Transport] = Strangers(STRANGERS_PER_ADDRESS, most)

    async def listen(self, host: str, port: int) -> asyncio.Server:
        self.worker.start()
        return await self._loop.create_server(lambda: Accepted(self._arrived), host, port)

    def close(self) -> None:
        for channel in (self._head, self._before, self._behind):
            if channel is not None:
                channel.close()
        for stranger in self.strangers:
            stranger.abort()
        self.worker.stop()

    # ---- connections ------------------------------------------------------------------------------------------------
    def _arrived(self, transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        for stranger in self.strangers.come(transport, counted_address(peer[0] if peer else "")):
            stranger.abort()
        self._start(self._connected(transport))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        job = self._loop.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _connected(self, transport: asyncio.Transport) -> None:
        try:
            channel, purpose = await accept(
                transport,
                key=self._key,
                name=self._name,
                certificate=self._certificate,
                may_dial=self._may_dial,
                pipe=_pipe,
            )
        except LinkClosed as error:
            log.debug("a connection was refused: %s", error)  # anyone can make thousands
            return
        finally:
            self.strangers.leave(transport)
        if purpose == "head":
            await self._serve_head(channel)
        else:
            await self._serve_before(channel)

    def _may_dial(self, purpose: Purpose, key: bytes) -> str | None:
        if key != (self._head_key if purpose == "head" else self._previous_key):
            return NOT_YOURS
        if purpose == "head" and self._head is not None and self._head.is_alive:
            return "it belongs to a pipeline that runs already: its address is given twice, or to two servers"
        return None

    async def _serve_head(self, channel: Channel) -> None:
        if self._head is not None:
            self._head.close("another head has linked")
        self._head = channel
        log.info("the head has linked")
        reason = await channel.run(partial(self._from_head, channel))
        if self._head is channel:
            log.info("the head is gone: %s", reason)
            self._head = None
            self._leave()

    async def _serve_before(self, channel: Channel) -> None:
        if self._before is not None:
            self._before.close("the stage before has linked again")
        self._before = channel
        reason = await channel.run(partial(self._from_before, channel))
        if self._before is channel:
            self._before = None
            self._neighbour_lost(f"the stage before: {reason}")

    def _leave(self) -> None:
        """Without a head there is no pipeline."""
        self._epoch = 0
        self._previous_key = None
        for channel in (self._before, self._behind):
            if channel is not None:
                channel.close()
        self._before = self._behind = None
        self.worker.assign(0, "float32", 0, is_first=False, is_last=False)

    def _neighbour_lost(self, reason: str) -> None:
        if self._head is not None and self._epoch:
            self._head.send(NeighbourLost(self._epoch, reason[:MAX_SENTENCE]))

    # ---- what comes -------------------------------------------------------------------------------------------------
    def _from_before(self, channel: Channel, found: Frame | Bulk) -> None:
        if channel is self._before and isinstance(found, Bulk):
            self.worker.put_hidden(found, partial(_taken, channel))

    def _from_head(self, channel: Channel, found: Frame | Bulk) -> None:
        if channel is not self._head:
            return
        match found:
            case Bulk():
                self.worker.put_kv(found, partial(_taken, channel))
            case Describe():
                self.worker.call(lambda: self._describe(found))
            case LoadSpan():
                self.worker.call(lambda: self._load(found))
            case Assign():
                self._assigned(found)
            case _:
                if not self._epoch:
                    raise RemoteProtocolError("a command before a place", close_code=CloseCode.UNEXPECTED_MESSAGE)
                self.worker.put(found)

    def _describe(self, message: Describe) -> None:
        """On the worker's thread."""
        if message.measured and self._measure is not None and self._cost is None:
            try:
                self._cost = self._measure()
            except Exception as error:  # of whatever the model's files hold
                log.warning("what layers cost could not be measured: %s", error)
                self.to_head(RequestFailed(message.request, str(error)[:MAX_SENTENCE]))
                return
        self.to_head(self._about(message.request))

    def _load(self, message: LoadSpan) -> None:
        """On the worker's thread."""
        try:
            stage = self.worker.load(message.first, message.stop)
        except Exception as error:
            log.warning("layers %d:%d could not be loaded: %s", message.first, message.stop, error)
            self.to_head(RequestFailed(message.request, str(error)[:MAX_SENTENCE]))
            return
        log.info("layers %d:%d, %d MiB resident", stage.first, stage.stop, resident_bytes() >> 20)
        self.to_head(self._about(message.request))

    def _about(self, request: int) -> About:
        stage, (fingerprint, layers) = self.worker.stage, self._model
        if stage is None:
            return About(request, fingerprint, "", layers, 0, 0, 0, 0, 0, 0, 0, resident_bytes(), self._cost)
        info = stage.info
        return About(
            request,
            info.fingerprint,
            info.dtype,
            stage.whole_layers,
            stage.first,
            stage.stop,
            stage.width,
            info.vocab_size,
            info.max_positions,
            stage.block_size,
            stage.free_rows(),
            resident_bytes(),
            self._cost,
        )

    def _assigned(self, message: Assign) -> None:
        stage = self.worker.stage
        self._epoch = message.epoch
        for channel in (self._before, self._behind):
            if channel is not None:
                channel.close("a place in another pipeline")
        self._before = self._behind = None
        self._previous_key = message.previous_key
        self.worker.assign(
            message.epoch,
            message.format,
            0 if stage is None else stage.width,
            is_first=message.previous_key is None,
            is_last=message.next_address is None,
        )
        self._start(self._take_place(message))

    async def _take_place(self, message: Assign) -> None:
        if message.next_address is not None and message.next_key is not None:
            deadline = self._loop.time() + DIAL_S
            while True:
                try:
                    channel = await self._dial(message.next_address, message.next_key)
                    break
                except LinkClosed as error:
                    if self._loop.time() >= deadline or self._epoch != message.epoch:
                        self.to_head(RequestFailed(message.request, str(error)[:MAX_SENTENCE]))
                        return
                    await asyncio.sleep(DIAL_PAUSE_S)
            if self._epoch != message.epoch:
                channel.close()
                return
            self._behind = channel
            self._start(self._serve_behind(channel))
        self.to_head(RequestDone(message.request))

    async def _dial(self, address: str, key: bytes) -> Channel:
        async def admit(claim: Claim) -> bytes | CloseCode:
            return key if claim.proves(key) else CloseCode.BAD_CREDENTIAL

        channel, _, _ = await dial_stage(address, self._key, "rows", admit, lambda: Pipe(PINGS))
        return channel

    async def _serve_behind(self, channel: Channel) -> None:
        reason = await channel.run(lambda _: None)
        if self._behind is channel:
            self._behind = None
            self._neighbour_lost(f"the stage behind: {reason}")

    # ---- as the worker's outlet, on its thread ----------------------------------------------------------------------
    def to_head(self, message: Frame, payload: bytes | None = None) -> None:
        if (head := self._head) is not None:
            try:
                if payload is None:
                    head.send(message)
                else:
                    head.send_bulk(message, payload)
            except LocalProtocolError as error:
                log.warning("a result could not be sent: %s", error)
                head.send(failure_of(message, str(error)))

    def to_next(self, header: HiddenRows, payload: bytes) -> None:
        if (behind := self._behind) is not None and header.epoch == self._epoch:
            behind.wait_room(WINDOW_BYTES)
            behind.send_bulk(header, payload)

    def lost(self, error: EngineLost) -> None:
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: EngineLost) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def failure_of(message: Frame, reason: str) -> Frame:
    """What the head is told in place of a result that is too large: it would wait for ever."""
    if isinstance(message, BatchDone):
        return BatchDone(message.epoch, message.ticket, [], [], [], reason[:MAX_SENTENCE])
    number = getattr(message, "request", None)
    return StagePing() if number is None else RequestFailed(number, reason[:MAX_SENTENCE])


def _taken(channel: Channel) -> None:
    if not channel.closed:
        channel.taken()


def _pipe(purpose: Purpose) -> Pipe:
    return Pipe(FROM_HEAD, KV_HEADERS) if purpose == "head" else Pipe(PINGS, HIDDEN_HEADERS)


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)
