"""R18: everything that was seen on the wire is sent again: in order, in part, mixed between handshakes.

Against machines without sockets: tests/wire/identity/test_handshake.py, 10,000 times.
"""

from __future__ import annotations

import random

import pytest

from device_agent.cloud import link_url
from paceline.runtime.link.transport import TransportClosed, dial
from paceline.wire.codec import decode, encode
from paceline.wire.messages import Ping, Welcome
from tests.reliability.conftest import Figure, Size
from tests.reliability.raw_link import device_link, enrolled
from tests.reliability.real_server import RealServer
from tests.wire.samples import opening

pytestmark = pytest.mark.anyio

HANDSHAKES = 3


async def answers(url: str, frames: list[bytes]) -> list[bytes]:
    """What a server says to these frames on a new connection, until it closes it."""
    transport, heard = await dial(link_url(url)), []
    try:
        for each in frames:
            await transport.send_bytes(each)
        while True:
            heard.append(await transport.recv_bytes())
    except TransportClosed:
        return heard
    finally:
        transport.abort()


async def test_no_frame_that_was_seen_lets_anybody_in(
    hall: RealServer, size: Size, rng: random.Random, figure: Figure
) -> None:
    credential = await enrolled(hall.url, hall.directory / "state", "replayed")
    seen: list[list[bytes]] = []
    for _ in range(HANDSHAKES):
        link = await device_link(hall.url, credential)
        await link.send(encode(opening(1)), encode(Ping(sent_at=1.0)))
        await link.close()
        seen.append(link.sent)
    linked = hall.log().count("linked with replayed")
    every = [frame for sent in seen for frame in sent]
    tries, accepted = size(100, 10_000), 0
    for number in range(tries):
        frames = list(rng.choice(seen))  # hello, proof and more as they were
        if number % 3 == 1:
            frames = [rng.choice(seen)[0], *(rng.choice(every) for _ in range(rng.randrange(1, 5)))]
        elif number % 3 == 2:
            frames[1:2] = [rng.choice(seen)[1], rng.choice(seen)[1]]
        for answer in await answers(hall.url, frames):
            accepted += isinstance(decode(answer), Welcome)
    assert accepted == 0
    assert hall.log().count("linked with replayed") == linked
    await (await device_link(hall.url, credential)).close()
    hall.check()
    figure("replays", tries)
    figure("accepted", accepted, at_most=0)
