"""R14: frames that break RFC 6455 or the link's schema, from strangers. An honest stream runs beside them."""

from __future__ import annotations

import random
from contextlib import ExitStack

from paceline.engine.fake import fake_model
from paceline.wire.close_codes import CloseCode
from tests.reliability.conftest import Figure, Size
from tests.reliability.mutation import Mutator
from tests.reliability.raw_websocket import CLOSE, TEXT, RawLink, broken_frames, frame, until_closed
from tests.reliability.real_server import Honest, RealServer, calm_p95, quantile

AT_ONCE = 20  # connections of strangers
SOON_S = 0.5  # after which the next ones come; a frame that has begun and never ends is waited for meanwhile
NAMED = {1000, 1001, 1002, 1003, 1005, 1006, 1007, 1008, 1009, *CloseCode}


def test_malformed_frames_close_their_connection_and_nothing_else(
    hall: RealServer, size: Size, rng: random.Random, figure: Figure
) -> None:
    mutator = Mutator(rng, vocab_size=fake_model().tokenizer.vocab_size)
    calm = calm_p95(hall)
    before, all_links, late = hall.rss(), list[RawLink](), list[RawLink]()
    with Honest(hall.url) as honest, ExitStack() as opened:
        for _ in range(0, size(160, 10_000), AT_ONCE):
            links = [opened.enter_context(RawLink(hall.address)) for _ in range(AT_ONCE)]
            for link in links:
                link.send(broken_frames(rng, mutator.garbage()))
                link.send(frame(CLOSE, b"\x03\xe8"))  # for those that would wait for more
            late += until_closed(links, patience=SOON_S)
            for link in links:
                if link.ended is not None:
                    link.socket.close()
            all_links += links
        until_closed(late)
    slowest = [link.ended or 0.0 for link in all_links]
    codes = {link.code for link in all_links}
    assert not honest.mistakes
    assert codes - {None} <= NAMED, "each close has a code of the protocol or of the link"
    hall.check()
    figure("strangers' frames: closed after, p99", quantile(slowest, 0.99), at_most=1, unit="s")
    figure("strangers' frames: growth of memory", (hall.rss() - before) / 2**20, at_most=10, unit="MiB")
    figure("strangers' frames: p95 gap beside them", honest.p95 / calm, at_most=1.5, unit="x calm")


def test_text_that_is_none_is_no_mistake_of_the_servers(hall: RealServer) -> None:
    bad = frame(TEXT, b"\xc3\x28")
    begun = frame(TEXT, b"\xc3", final=False)
    for sent in (bad, bad + frame(CLOSE, b"\x03\xe8"), frame(CLOSE, b"\x03\xe8") + bad, begun + frame(0, b"\x28")):
        with RawLink(hall.address) as link:
            link.send(sent)
            until_closed([link])
            assert link.code in (1000, CloseCode.BAD_FRAME)
    assert "Traceback" not in hall.log() and " ERROR " not in hall.log()
