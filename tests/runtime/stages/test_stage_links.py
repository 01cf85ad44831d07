"""One connection of a pipeline: a full pipe makes its sender wait and nobody else, and what ends it is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from paceline.runtime.identity import PrivateKey, dialling_handshake, stage_handshake
from paceline.runtime.link.transport import StreamTransport
from paceline.runtime.stages.links import StageLink
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Bulk, Claim
from paceline.wire.identity import Handshake
from paceline.wire.messages import Frame
from paceline.wire.stages.link import StageMachine
from paceline.wire.stages.messages import HiddenRows, RequestDone

pytestmark = pytest.mark.anyio
WINDOW = 1 << 16
ROWS = bytes(8 * WINDOW)
HEAD, STAGE = PrivateKey(bytes([1]) * 32), PrivateKey(bytes([2]) * 32)


async def admit(claim: Claim) -> bytes | CloseCode:
    known = {"head": HEAD.public_key, "stage": STAGE.public_key}
    return known[claim.device] if claim.proves(known[claim.device]) else CloseCode.STAGE_REFUSES


@dataclass
class End:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    hand: Handshake
    found: list[Frame | Bulk] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    heard_by: Callable[[Frame | Bulk], None] | None = None

    def __post_init__(self) -> None:
        machine = StageMachine(self.hand, window=WINDOW)
        self.link = StageLink(StreamTransport(self.reader, self.writer), machine, admit, received=self.heard)
        self.link.start()

    def heard(self, _: StageLink, message: Frame | Bulk) -> None:
        if self.heard_by is not None:
            self.heard_by(message)
        self.found.append(message)
        self.came.set()

    async def until(self, count: int) -> None:
        while len(self.found) < count:
            self.came.clear()
            await self.came.wait()


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[End, End]]:
    one, other = [await asyncio.open_connection(sock=half) for half in socket.socketpair()]
    first, second = End(*one, dialling_handshake("head", HEAD, b"")), End(*other, stage_handshake("stage", STAGE, b""))
    async with asyncio.timeout(120):
        for each in (first, second):
            await each.link.settled.wait()
        yield first, second
        for each in (first, second):
            await each.link.close()


async def test_who_fills_a_pipe_waits_while_messages_go_past_and_the_link_stays() -> None:
    async with ends() as (sender, receiver):
        for ticket in (1, 2):
            sender.link.send_bulk(HiddenRows(1, ticket, (None,), None), ROWS)
        waiting = asyncio.create_task(asyncio.to_thread(sender.link.wait_room, 0))
        await receiver.until(1)  # nobody takes it, so the second one stops after one window
        for number in range(50):
            sender.link.send(RequestDone(number))
            receiver.link.send(RequestDone(number))
        await receiver.until(51)
        await sender.until(50)
        assert [type(each) for each in receiver.found].count(Bulk) == 1
        assert not waiting.done() and not sender.link.closed.is_set()
        receiver.link.taken()
        await receiver.until(52)
        await waiting
        assert isinstance(receiver.found[-1], Bulk) and receiver.found[-1].payload == ROWS


async def test_who_waits_for_room_does_not_wait_for_a_broken_link() -> None:
    async with ends() as (sender, receiver):
        for ticket in (1, 2):
            sender.link.send_bulk(HiddenRows(1, ticket, (None,), None), ROWS)
        waiting = asyncio.create_task(asyncio.to_thread(sender.link.wait_room, 0))
        await receiver.until(1)
        receiver.link.break_off()
        await waiting
        assert sender.link.closed.is_set()


async def test_a_message_that_cannot_be_taken_ends_the_link_with_a_reason() -> None:
    async with ends() as (sender, receiver):

        def heard(_: Frame | Bulk) -> None:
            raise KeyError("no such thing")

        receiver.heard_by = heard
        sender.link.send(RequestDone(1))
        await receiver.link.closed.wait()
        await sender.link.closed.wait()
        assert "could not be taken" in receiver.link.reason and "could not be taken" in sender.link.reason
