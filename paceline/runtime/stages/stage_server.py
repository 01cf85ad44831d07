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

import psutil

from paceline.core.addresses import Strangers, counted_address
from paceline.engine.stage import Stage
from paceline.errors import EngineLost, LinkClosed, LocalProtocolError, RemoteProtocolError
from paceline.runtime.identity import PrivateKey, stage_handshake
from paceline.runtime.stages.links import Accepted, Certificate, StageLink, dial_stage, tls_of
from paceline.runtime.stages.stage_worker import StageWorker
from paceline.system import open_files
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Bulk, Claim
from paceline.wire.messages import Frame
from paceline.wire.stages import messages
from paceline.wire.stages.link import WINDOW_BYTES, StageMachine
from paceline.wire.stages.messages import BatchDone

log = logging.getLogger("paceline.stage")

DIAL_S = 5.0  # for the stage behind to know who will dial it
DIAL_PAUSE_S = 0.05
QUIET_S = 2.5  # two heartbeats of a head have not come: another may take its place
STRANGERS_PER_ADDRESS = 128
MAX_STRANGERS = 512  # or half of the files that may be open, if that is less


class StageServer:
    """Belongs to the loop it is made on."""

    def __init__(
        self,
        load: Callable[[int, int], Stage],
        *,
        key: PrivateKey,
        name: str,
        head_key: bytes,
        model: tuple[str, int],
        cost: Callable[[], messages.StageCost] | None = None,
    ) -> None:
        """load: layers, from the first to that behind the last. model: its fingerprint and number of layers. cost:
        measures what layers cost here, on the worker's thread; None: the layers are given."""
        self.worker = StageWorker(load, self)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the device is lost
        self._loop = asyncio.get_running_loop()
        self._key, self._name, self._head_key = key, name, head_key
        self._model = model
        self._measure = cost
        self._cost: messages.StageCost | None = None
        self._certificate = Certificate.fresh()
        self._head: StageLink | None = None
        self._before: StageLink | None = None
        self._behind: StageLink | None = None
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
        for link in (self._head, self._before, self._behind):
            if link is not None:
                link.break_off()
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
        def up(link: StageLink) -> None:
            self.strangers.leave(transport)
            self._linked(link)

        hand = stage_handshake(self._name, self._key, self._certificate.shown)
        try:
            tls = await tls_of(transport, self._certificate)
            link = StageLink(
                tls, StageMachine(hand), self._admit, received=self._received, on_up=up, on_down=self._gone
            )
            await link.run()
            if not link.up.is_set():
                log.debug("a connection was refused: %s", link.reason)  # anyone can make thousands
        except LinkClosed as error:
            log.debug("a connection was refused: %s", error)
        finally:
            self.strangers.leave(transport)

    async def _admit(self, claim: Claim) -> bytes | CloseCode:
        """Who may dial: the head that this stage has pinned, and the stage before, whose key the head has told."""
        key = {"head": self._head_key, "rows": self._previous_key}.get(claim.device)
        if key is None or not claim.proves(key):
            return CloseCode.STAGE_REFUSES
        if claim.device == "head" and self._head is not None and self._head.silence_s < QUIET_S:
            return CloseCode.STAGE_TAKEN
        return key

    def _linked(self, link: StageLink) -> None:
        former, what = (self._head, "head") if link.purpose == "head" else (self._before, "stage before")
        if link.purpose == "head":
            self._head = link
            log.info("the head has linked")
        else:
            self._before = link
        if former is not None:
            former.break_off(f"another {what} has linked")

    def _gone(self, link: StageLink) -> None:
        if link is self._head:
            log.info("the head is gone: %s", link.reason)
            self._head = None
            self._leave()
        elif link is self._before:
            self._before = None
            self._neighbour_lost(f"the stage before: {link.reason}")
        elif link is self._behind:
            self._behind = None
            self._neighbour_lost(f"the stage behind: {link.reason}")

    def _leave(self) -> None:
        """Without a head there is no pipeline."""
        self._epoch = 0
        self._previous_key = None
        self._part("the head is gone")
        self.worker.assign(None)

    def _part(self, reason: str) -> None:
        """From the neighbours."""
        neighbours = self._before, self._behind
        self._before = self._behind = None
        for link in neighbours:
            if link is not None:
                link.break_off(reason)

    def _neighbour_lost(self, reason: str) -> None:
        if self._head is not None and self._epoch:
            self._head.send(messages.NeighbourLost(self._epoch, reason[: messages.MAX_SENTENCE]))

    # ---- what comes -------------------------------------------------------------------------------------------------
    def _received(self, link: StageLink, found: Frame | Bulk) -> None:
        match found:
            case Bulk(header=messages.HiddenRows()) if link is self._before:
                self.worker.put_bulk(found, link.taken)
            case _ if link is self._head:
                self._from_head(link, found)
            case _:
                pass  # of a link that another has replaced, or a neighbour has no say in it

    def _from_head(self, link: StageLink, found: Frame | Bulk) -> None:
        match found:
            case Bulk(header=messages.KvRows()):
                self.worker.put_bulk(found, link.taken)
            case messages.Describe():
                self.worker.answer(found.request, lambda: self._describe(found))
            case messages.LoadSpan():
                self.worker.answer(found.request, lambda: self._load(found))
            case messages.Assign():
                self._assigned(found)
            case Bulk():
                raise RemoteProtocolError("rows that no head has", close_code=CloseCode.UNEXPECTED_MESSAGE)
            case _:
                if not self._epoch:
                    raise RemoteProtocolError("a command before a place", close_code=CloseCode.UNEXPECTED_MESSAGE)
                self.worker.put(found)

    def _describe(self, message: messages.Describe) -> messages.About:
        """On the worker's thread."""
        if message.measured and self._measure is not None and self._cost is None:
            self._cost = self._measure()
        return self._about(message.request)

    def _load(self, message: messages.LoadSpan) -> messages.About:
        """On the worker's thread."""
        stage = self.worker.load(message.first, message.stop)
        log.info("layers %d:%d, %d MiB resident", stage.first, stage.stop, resident_bytes() >> 20)
        return self._about(message.request)

    def _about(self, request: int) -> messages.About:
        stage, (fingerprint, layers) = self.worker.stage, self._model
        if stage is None:
            return messages.About(request, fingerprint, "", layers, *(0,) * 7, resident_bytes(), self._cost)
        info, span = stage.info, (stage.first, stage.stop)
        rows = stage.width, info.vocab_size, info.max_positions, stage.block_size, stage.free_rows()
        return messages.About(
            request, info.fingerprint, info.dtype, stage.whole_layers, *span, *rows, resident_bytes(), self._cost
        )

    def _assigned(self, message: messages.Assign) -> None:
        self._epoch = message.epoch
        self._part("a place in another pipeline")
        self._previous_key = message.previous_key
        self.worker.assign(message)
        self._start(self._take_place(message))

    async def _take_place(self, message: messages.Assign) -> None:
        if message.next_address is not None and message.next_key is not None:
            deadline = self._loop.time() + DIAL_S
            while True:
                try:
                    link = await self._dial(message.next_address, message.next_key)
                    break
                except LinkClosed as error:
                    if self._loop.time() >= deadline or self._epoch != message.epoch:
                        self.to_head(messages.RequestFailed(message.request, str(error)[: messages.MAX_SENTENCE]))
                        return
                    await asyncio.sleep(DIAL_PAUSE_S)
            if self._epoch != message.epoch:
                link.break_off()
                return
            self._behind = link
            if not link.is_open:  # lost before it was known here
                self._gone(link)
        self.to_head(messages.RequestDone(message.request))

    async def _dial(self, address: str, key: bytes) -> StageLink:
        async def admit(claim: Claim) -> bytes | CloseCode:
            return key if claim.proves(key) else CloseCode.BAD_CREDENTIAL

        return await dial_stage(address, self._key, "rows", admit, received=self._received, on_down=self._gone)

    # ---- results, on the worker's thread ----------------------------------------------------------------------------
    def to_head(self, message: Frame, payload: bytes = b"") -> None:
        """payload: of a bulk message, whose header the message is. Without effect once the head is gone."""
        if (head := self._head) is not None:
            try:
                if isinstance(message, messages.BulkHeader):
                    head.send_bulk(message, payload)
                else:
                    head.send(message)
            except LocalProtocolError as error:
                log.warning("a result could not be sent: %s", error)
                head.send(failure_of(message, str(error)))

    def to_next(self, header: messages.HiddenRows, payload: bytes) -> None:
        """Waits while the link to the next stage is full."""
        if (behind := self._behind) is not None and header.epoch == self._epoch:
            behind.wait_room(WINDOW_BYTES)
            behind.send_bulk(header, payload)

    def lost(self, error: EngineLost) -> None:
        """The device is unusable: the process must end."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: EngineLost) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def failure_of(message: Frame, reason: str) -> Frame:
    """What the head is told in place of a result that is too large: it would wait for ever."""
    if isinstance(message, BatchDone):
        return BatchDone(message.epoch, message.ticket, (), (), reason[: messages.MAX_SENTENCE])
    assert isinstance(message, messages.Numbered), "all others are answers"
    return messages.RequestFailed(message.request, reason[: messages.MAX_SENTENCE])


def resident_bytes() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)
