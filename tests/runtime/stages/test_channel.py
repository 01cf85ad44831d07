"""One connection of a pipeline: a full pipe makes its sender wait and nobody else, and what ends it is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from paceline.runtime.stages.connecting import Channel
from paceline.wire.messages import Frame
from paceline.wire.stages.messages import Codec, HiddenRows, RequestDone, StagePing
from paceline.wire.stages.pipe import Bulk, Pipe

pytestmark = pytest.mark.anyio
WINDOW = 1 << 16
ROWS = bytes(8 * WINDOW)


@dataclass
class End:
    channel: Channel
    found: list[Frame | Bulk] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    heard_by: Callable[[Frame | Bulk], None] | None = None

    async def run(self) -> None:
        await self.channel.run(self.heard)
        self.ended.set()

    def heard(self, message: Frame | Bulk) -> None:
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
    async def end(half: socket.socket) -> End:
        reader, writer = await asyncio.open_connection(sock=half)
        return End(Channel(reader, writer, Pipe(Codec(StagePing, RequestDone), Codec(HiddenRows), window=WINDOW)))

    one, other = [await end(half) for half in socket.socketpair()]
    jobs = [asyncio.create_task(each.run()) for each in (one, other)]
    async with asyncio.timeout(120):
        yield one, other
    for each in (one, other):
        each.channel.close()
    await asyncio.gather(*jobs)


async def test_who_fills_a_pipe_waits_while_messages_go_past_and_the_link_stays() -> None:
    async with ends() as (sender, receiver):
        for ticket in (1, 2):
            sender.channel.send_bulk(HiddenRows(1, ticket, [None], None), ROWS)
        waiting = asyncio.create_task(asyncio.to_thread(sender.channel.wait_room, 0))
        await receiver.until(1)  # nobody takes it, so the second one stops after one window
        for number in range(50):
            sender.channel.send(RequestDone(number))
            receiver.channel.send(RequestDone(number))
        await receiver.until(51)
        await sender.until(50)
        assert [type(each) for each in receiver.found].count(Bulk) == 1
        assert not waiting.done() and not sender.channel.closed
        receiver.channel.taken()
        await receiver.until(52)
        await waiting
        assert isinstance(receiver.found[-1], Bulk) and receiver.found[-1].payload == ROWS


async def test_who_waits_for_room_does_not_wait_for_a_broken_link() -> None:
    async with ends() as (sender, receiver):
        for ticket in (1, 2):
            sender.channel.send_bulk(HiddenRows(1, ticket, [None], None), ROWS)
        waiting = asyncio.create_task(asyncio.to_thread(sender.channel.wait_room, 0))
        await receiver.until(1)
        receiver.channel.close()
        await waiting
        assert sender.channel.closed


async def test_a_message_that_cannot_be_taken_ends_the_link_with_a_reason() -> None:
    async with ends() as (sender, receiver):

        def heard(_: Frame | Bulk) -> None:
            raise KeyError("no such thing")

        receiver.heard_by = heard
        sender.channel.send(RequestDone(1))
        await receiver.ended.wait()
        assert "could not be taken" in receiver.channel.reason
