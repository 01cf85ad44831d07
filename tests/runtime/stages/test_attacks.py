"""Strangers at a stage's port, garbage, and a second head: the pipeline that runs is not disturbed."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.loader import EngineOptions
from paceline.errors import ConfigError
from paceline.runtime.identity import PrivateKey, dialling_handshake
from paceline.runtime.stages import stage_server
from paceline.runtime.stages.links import dialling_context
from paceline.runtime.stages.members import Place
from paceline.wire.codec import decode
from paceline.wire.messages import Challenge
from tests.runtime.stages.rig import DEMO, Rig, even_spans, open_pipeline, rig

OPTIONS = EngineOptions(dtype="float32", kv_rows=512)
GARBAGE = b"\x00\x00\x00\x05\x00hello" + bytes(range(256))


@pytest.fixture(scope="module")
def made() -> Iterator[Rig]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stage_server, "STRANGERS_PER_ADDRESS", 8)
        with rig(DEMO, even_spans(6, 2), options=OPTIONS) as found:
            yield found


def still_runs(made: Rig) -> None:
    """On the links that it had before."""
    pipeline = made.pipeline
    assert len(pipeline.collect(pipeline.submit(Batch((Segment(SeqId(1), 0, (5, 6)),)))).dists[0]) == 1
    pipeline.release(SeqId(1))
    pipeline.check()
    assert pipeline.losses == 0


def is_hung_up(connection: socket.socket) -> bool:
    """Waits for the other end, whatever it says before."""
    connection.settimeout(60)
    with suppress(ConnectionError, ssl.SSLError):
        while connection.recv(4096):
            pass
    return True


def test_a_crowd_of_strangers_is_cut_and_the_pipeline_goes_on(made: Rig) -> None:
    port = made.stages[0].port
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        assert all(is_hung_up(each) for each in crowd[:32]), "the oldest are cut for the newest"
        assert len(made.stages[0].server.strangers) <= 8
        still_runs(made)
        with pytest.raises(ConfigError, match="not let in"):  # an honest end is heard in the crowd
            open_pipeline(DEMO, [Place(made.stages[0].address)], PrivateKey.generate(), {})
    finally:
        for each in crowd:
            each.close()


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def next_message(connection: ssl.SSLSocket) -> bytes:
    found = b""
    while len(found) < 4 or len(found) < 4 + int.from_bytes(found[:4], "big"):
        found += connection.recv(4096)
    return found[4:]


@pytest.mark.parametrize("point", ["plain", "hello", "proof", "linked"])
def test_garbage_closes_its_own_connection_alone(made: Rig, point: str) -> None:
    """Before TLS, in place of the first message, of the second, and (of an owner of the head's key) on the link."""
    address = ("127.0.0.1", made.stages[1].port)
    plain = socket.create_connection(address)
    if point == "plain":
        plain.sendall(GARBAGE)
        assert is_hung_up(plain)
        plain.close()
        return still_runs(made)
    with dialling_context().wrap_socket(plain) as connection:
        if point != "hello":
            hand = dialling_handshake("rows", PrivateKey.generate(), b"")
            connection.sendall(framed(hand.begin()))
            answer = next_message(connection)
            challenge = decode(answer)
            assert isinstance(challenge, Challenge)
            hand.challenged(challenge, answer)
            if point == "linked":  # with a key that proves itself and may not dial: garbage behind the proof
                connection.sendall(framed(hand.prove(bytes(32))) + GARBAGE)
        with suppress(OSError):  # it may have hung up already
            connection.sendall(GARBAGE)
        assert is_hung_up(connection)
    still_runs(made)


def test_a_stage_is_not_taken_from_a_pipeline_that_runs(made: Rig) -> None:
    """By another server with the same key, which would take it back for ever."""
    with pytest.raises(ConfigError, match="belongs to a pipeline that runs already"):
        open_pipeline(DEMO, [Place(stage.address) for stage in made.stages], made.head, made.keys)
    still_runs(made)


def test_garbage_of_the_head_ends_the_link_and_it_links_again(made: Rig) -> None:
    """Last of these: it counts as a loss."""
    link = made.pipeline.members.order[0].link
    assert link is not None

    async def spoil() -> None:
        link._stream._writer.write(GARBAGE)

    loop = made.pipeline._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(spoil(), loop).result()
    pipeline = made.pipeline
    while not pipeline.losses:
        pipeline.collect(pipeline.submit(Batch((Segment(SeqId(2), pipeline.length(SeqId(2)), (5,)),))))
    assert len(pipeline.collect(pipeline.submit(Batch((Segment(SeqId(3), 0, (5, 6)),)))).dists[0]) == 1
    pipeline.check()
