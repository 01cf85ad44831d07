"""R15: frames that announce a gigabyte, fragments without end, compressed ones, one byte at a time. By strangers, since
a device that is admitted has said who it is."""

from __future__ import annotations

import zlib
from contextlib import ExitStack

from tests.reliability.conftest import Figure, Size
from tests.reliability.raw_websocket import BINARY, PING, RawLink, frame, until_closed
from tests.reliability.real_server import Honest, RealServer

PIECE = frame(BINARY, bytes(4096), final=False)
NEXT = frame(0, bytes(4096), final=False)
_packer = zlib.compressobj(9, zlib.DEFLATED, -15)
BOMB = (_packer.compress(bytes(64 << 20)) + _packer.flush(zlib.Z_SYNC_FLUSH))[:-4]  # 64 MiB in 64 KiB

# What is sent at first, and then over and over.
ATTACKS: dict[str, tuple[bytes, bytes]] = {
    "1 GiB announced": (frame(BINARY, announced=1 << 30), bytes(1024)),
    "2^63 announced": (frame(BINARY, announced=(1 << 63) - 1), bytes(1024)),
    "endless fragments": (PIECE, NEXT * 8),
    "fragments of nothing": (frame(BINARY, final=False), frame(0, final=False) * 8),
    "deflate bomb": (frame(BINARY, BOMB, reserved=4), frame(BINARY, BOMB, reserved=4)),
    "one byte at a time": (frame(BINARY, announced=60_000), b"x"),
    "pings for ever": (frame(PING, b"?"), frame(PING, b"?" * 125)),
}


def test_frames_without_end_cost_little_and_end_soon(hall: RealServer, size: Size, figure: Figure) -> None:
    number = size(6, 70)  # of each
    with ExitStack() as stack, Honest(hall.url) as honest:
        before = hall.rss()
        links = {name: [stack.enter_context(RawLink(hall.address)) for _ in range(number)] for name in ATTACKS}
        for name, attackers in links.items():
            for link in attackers:
                link.send(ATTACKS[name][0])
        everyone = [link for attackers in links.values() for link in attackers]
        until_closed(everyone, [ATTACKS[name][1] for name in links for _ in range(number)])
        grown = hall.rss() - before
    assert not honest.mistakes
    hall.check()
    for name, attackers in links.items():
        figure(f"{name}: closed after, worst", max(link.ended or 0.0 for link in attackers), at_most=10, unit="s")
    figure("memory each, all together", grown / len(everyone) / 2**20, at_most=2, unit="MiB")
