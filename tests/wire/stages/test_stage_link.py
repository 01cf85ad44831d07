"""The link of a stage: rows, batches, what is too much, and its handshake."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.aggregation.weights import BranchMixture
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import RowHead, RowSampling, SampledRow, SamplingParams
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.runtime.identity import PrivateKey, dialling_handshake, stage_handshake
from paceline.wire.close_codes import CloseCode
from paceline.wire.codec import decode_with, encode
from paceline.wire.effects import Bulk, Claim, Deliver, Disconnected, Effect, Transmit
from paceline.wire.messages import Frame
from paceline.wire.stages import link as stage_link
from paceline.wire.stages.link import BULK_BEGINS, CHUNK, StageMachine, bulk_header
from paceline.wire.stages.messages import (
    MAX_BULK_BYTES,
    MAX_ROWS,
    Credit,
    Forget,
    HiddenRows,
    Kept,
    PruneRows,
    RunBatch,
    SampledRows,
    SampleRows,
    Wanted,
    kept_of,
    sampled_to_wire,
    without_others,
)
from tests.wire.identities import claim_of, frame_of

WINDOW = 64
HEAD, STAGE, OTHER = (PrivateKey(bytes([n]) * 32) for n in (1, 2, 3))


class End:
    """A machine that is up, what it has still to send, and what it has delivered."""

    def __init__(self, machine: StageMachine) -> None:
        self.machine = machine
        self.out: list[bytes] = []
        self.messages: list[Frame] = []
        self.bulks: list[Bulk] = []
        self.untaken = 0
        self.unsent = 0  # bytes of bulk messages
        self.end: Disconnected | None = None

    def did(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Transmit(data):
                    self.out.append(data)
                case Deliver(Bulk() as bulk):
                    self.bulks.append(bulk)
                    self.untaken += 1
                case Deliver(Credit()):
                    pass
                case Deliver(message):
                    assert isinstance(message, Frame)
                    self.messages.append(message)
                case Disconnected():
                    self.end = effect

    def hear(self, *frames: bytes) -> None:
        for frame in frames:
            self.did(self.machine.received(frame, 1.0))

    def send(self, message: Frame) -> None:
        self.out.append(encode(message))

    def send_bulk(self, header: HiddenRows, payload: bytes) -> None:
        self.machine.send_bulk(bulk_header(header, payload), payload)
        self.unsent += len(payload)

    def take(self) -> None:
        self.untaken -= 1
        self.did(self.machine.taken())

    def flow(self) -> list[bytes]:
        """Everything that may be written now: messages first."""
        frames, self.out = self.out, []
        while (found := self.machine.next_frame()) is not None:
            frames.append(found[0])
            self.unsent -= found[1]
        return frames


def linked() -> tuple[End, End]:
    """Two ends with small windows, nothing on its way."""
    a = StageMachine(dialling_handshake("rows", HEAD, b""), window=WINDOW)
    b = StageMachine(stage_handshake("s", STAGE, b""), window=WINDOW)
    b.connection_made(0.0)
    a.received(frame_of(b.received(frame_of(a.connection_made(0.0)), 0.0)), 0.0)
    b.received(frame_of(a.authenticated(STAGE.public_key, 0.0)), 0.0)
    welcome = b.authenticated(HEAD.public_key, 0.0)[0]
    assert isinstance(welcome, Transmit)
    a.received(welcome.data, 0.0)
    assert a.is_up and b.is_up
    return End(a), End(b)


# ---- batches --------------------------------------------------------------------------------------------------------
@st.composite
def batches(draw: st.DrawFn) -> Batch:
    segments = []
    for seq in range(draw(st.integers(0, 3))):
        n = draw(st.integers(1, 6))
        tokens = tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)))
        logits = draw(st.sampled_from(["all", "last", "none", 2]))
        if draw(st.booleans()):
            segments.append(Segment(SeqId(seq), draw(st.integers(0, 99)), tokens, None, logits))
            continue
        ids = tuple(sorted(draw(st.sets(st.integers(0, 50), min_size=n, max_size=n))))
        parents = tuple(draw(st.sampled_from([-1, *ids[:row]])) for row in range(n))
        segments.append(Segment(SeqId(seq), 3, tokens, parents, logits, draw(st.sampled_from([ids]))))
    return Batch(tuple(segments))


@given(batches(), st.data())
def test_a_batch_and_what_is_left_of_it_come_back(batch: Batch, data: st.DataObject) -> None:
    found = Batch(msgspec.msgpack.decode(encode(RunBatch(7, batch.segments)), type=RunBatch).segments)
    assert found == batch
    kept = tuple(
        None
        if segment.parents is None or data.draw(st.booleans())
        else tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(segment.tokens)))))))
        for segment in batch.segments
    )
    left = without_others(found, kept)
    whole = tuple(
        None if rows is not None and len(rows) == len(segment.tokens) else rows
        for rows, segment in zip(kept, batch.segments, strict=True)
    )
    assert kept_of(found, left) == whole
    for segment in left.segments:
        asked = next(each for each in batch.segments if each.seq == segment.seq)
        names = {asked.node_ids[row] for row in asked.logits_rows()} if asked.parents is not None else None
        if names is not None:
            wanted = [segment.node_ids[row] for row in segment.logits_rows()]
            assert wanted == [name for name in segment.node_ids if name in names]


@pytest.mark.parametrize("kept", [(), ((0, 0),), ((1, 0),), ((9,),), (None, None)])
def test_rows_that_a_batch_has_not_are_refused(kept: Kept) -> None:
    batch = Batch((Segment(SeqId(1), 0, (1, 2), (-1, 0)),))
    with pytest.raises(RemoteProtocolError):
        without_others(batch, kept)


def _bulk(size: int, payload: bytes = b"") -> bytes:
    header = encode(HiddenRows(1, 1, (), None))
    return BULK_BEGINS + len(header).to_bytes(4, "big") + size.to_bytes(4, "big") + header + payload


# ---- bulk messages --------------------------------------------------------------------------------------------------
Sent = st.lists(st.one_of(st.integers(0, 30), st.binary(max_size=300)), max_size=12)


@given(Sent)
def test_everything_comes_in_order(sent: list[int | bytes]) -> None:
    a, b = linked()
    messages: list[Frame] = []
    bulks: list[tuple[int, bytes]] = []
    for number, each in enumerate(sent):
        if isinstance(each, int):
            messages.append(Forget((each,)))
            a.send(messages[-1])
        else:
            bulks.append((number, each))
            a.send_bulk(HiddenRows(1, number, (), None), each)
    while frames := a.flow():
        b.hear(*frames)
        while b.untaken:
            b.take()
        a.hear(*b.flow())
    assert b.messages == messages
    found = [(bulk.header, bytes(bulk.payload)) for bulk in b.bulks]
    assert found == [(HiddenRows(1, number, (), None), each) for number, each in bulks]
    assert a.unsent == 0 and a.end is b.end is None


def test_a_full_link_holds_rows_back_but_no_message() -> None:
    a, b = linked()
    for ticket in range(4):
        a.send_bulk(HiddenRows(1, ticket, (), None), bytes(50))
    b.hear(*a.flow())
    assert len(b.bulks) == 1, "one message, and what of the next fits into a window"
    a.hear(*b.flow())
    b.hear(*a.flow())
    assert not b.flow() or len(b.bulks) <= 2
    held = a.unsent
    assert held > 0
    a.send(PruneRows(1, (0,), (), 3))
    b.hear(*a.flow())
    assert [type(found) for found in b.messages] == [PruneRows], "it overtakes rows that have no credit"
    assert a.unsent == held
    for _ in range(20):
        if b.untaken:
            b.take()
        a.hear(*b.flow())
        b.hear(*a.flow())
    assert a.unsent == 0 and len(b.bulks) == 4


def test_a_message_larger_than_the_window_passes_while_it_is_waited_for() -> None:
    a, b = linked()
    a.send_bulk(HiddenRows(1, 1, (), None), bytes(range(250)) * 3)
    while frames := a.flow():
        b.hear(*frames)
        a.hear(*b.flow())
    assert [bytes(bulk.payload) for bulk in b.bulks] == [bytes(range(250)) * 3]


def test_what_is_not_taken_is_bounded() -> None:
    a, b = linked()
    for ticket in range(50):
        a.send_bulk(HiddenRows(1, ticket, (), None), bytes(100))
    for _ in range(200):
        b.hear(*a.flow())
        a.hear(*b.flow())
    assert 50 * 100 - a.unsent <= 100 + WINDOW


@given(st.binary(max_size=400))
def test_hostile_bytes_close_the_link_and_raise_nothing(data: bytes) -> None:
    _, b = linked()
    b.hear(data)
    assert b.end is None or b.end.code in (CloseCode.BAD_FRAME, CloseCode.TOO_LARGE, CloseCode.UNEXPECTED_MESSAGE)


@given(st.data())
def test_changed_bytes_of_honest_frames_raise_nothing(data: st.DataObject) -> None:
    a, b = linked()
    a.send(RunBatch(1, (Segment(SeqId(1), 0, (1, 2, 3), (-1, 0, 1)),)))
    a.send_bulk(HiddenRows(1, 1, ((0, 2),), None), bytes(40))
    a.send(PruneRows(1, (0, 1), (2,), 5))
    frames = [bytearray(frame) for frame in a.flow()]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = data.draw(st.sampled_from(frames))
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    b.hear(*map(bytes, frames))
    assert all(isinstance(found, Frame) for found in b.messages)


@pytest.mark.parametrize(
    ("what", "frames"),
    [
        ("a chunk beyond its credit", [_bulk(500), CHUNK + bytes(WINDOW + 1)]),
        ("a chunk of nothing", [CHUNK + b"x"]),
        ("a chunk beyond its message", [_bulk(3), CHUNK + b"1234"]),
        ("a first chunk beyond its message", [_bulk(3, b"1234")]),
        ("a header that is none", [BULK_BEGINS + (9).to_bytes(4, "big") + bytes(4) + encode(Credit(1))]),
        ("a header alone", [_bulk(3)[9:]]),
        ("a message within a message", [_bulk(3), _bulk(3)]),
        ("more than a bulk message may have", [_bulk(MAX_BULK_BYTES + 1)]),
        ("credit that nobody needs", [encode(Credit(1))]),
        ("a frame of no kind", [b"\x09"]),
        ("an empty frame", [b""]),
        ("a message of another link", [msgspec.msgpack.encode(["drain"])]),
        ("a handshake once more", [msgspec.msgpack.encode(["hello", 1, "head", bytes(32)])]),
    ],
)
def test_what_breaks_the_protocol_closes_the_link(what: str, frames: list[bytes]) -> None:
    _, b = linked()
    b.hear(*frames)
    assert b.end is not None and b.end.code in (
        CloseCode.BAD_FRAME,
        CloseCode.TOO_LARGE,
        CloseCode.UNEXPECTED_MESSAGE,
    ), what


def test_what_the_other_end_would_refuse_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError):
        encode(PruneRows(1, (2**52,) * (MAX_ROWS * 16), (2**52,) * (MAX_ROWS * 16), None))
    with pytest.raises(LocalProtocolError):
        bulk_header(HiddenRows(1, 1, (), None), memoryview(np.broadcast_to(np.uint8(0), MAX_BULK_BYTES + 1)))


def received(message: Frame) -> Frame:
    """As the other end has it."""
    return decode_with(stage_link._decoder.decode, encode(message))


def test_what_is_asked_of_rows_comes_as_it_was() -> None:
    params = SamplingParams(0.5, 0.9, 40, 0.1, logit_bias={3: -1.0}, seed=-7, repetition_penalty=1.2)
    allowed = np.arange(101) % 3 == 0
    row = RowSampling(params, 9, 101, {np.int64(4): 2}, np.array([1, 5], np.int32), allowed, 3)
    mixture = BranchMixture((0.0, -1.0), ((0.5, -0.5),), True, (-1,), (0,), (None, np.array([2], np.int32)), True)
    sent = SampleRows(6, [Wanted([[(1, 0)], []], [row, RowSampling(SamplingParams(), 0, 101)], mixture)])
    found = received(sent)
    assert isinstance(found, SampleRows) and found.request == 6
    (wanted,) = found.wanted
    got = wanted.rows[0]
    assert (got.params, got.position, got.vocab_size, got.counts, got.num_top) == (params, 9, 101, {4: 2}, 3)
    assert got.prompt is not None and got.prompt.tolist() == [1, 5] and got.prompt.dtype == np.int32
    assert got.allowed is not None and got.allowed[:101].tolist() == allowed.tolist() and not got.allowed[101:].any()
    assert wanted.rows[1].allowed is None and wanted.mixture is not None
    assert wanted.mixture.prompts[1] is not None and wanted.mixture.prompts[1].tolist() == [2]
    assert (wanted.mixture.log_weights, wanted.mixture.evidence) == (mixture.log_weights, mixture.evidence)


def test_what_was_sampled_comes_as_it_was_and_what_cannot_be_closes_the_link() -> None:
    dist = Dist(np.array([2, 7], np.int32), np.array([0.25, 0.5]), 0.25, 1.5)
    dist.memo["cut"] = Dist(dist.ids, dist.probs)
    head = RowHead(dist, np.array([1, 0]), np.array([-0.5, -1.0]), -math.inf, 0.125)
    row = sampled_to_wire(SampledRow(7, dist.kept_at(np.array([0, 1])), (0.5, 0.25), head, (), lambda: (dist,)))
    found = received(SampledRows(3, [[row], []]))
    assert isinstance(found, SampledRows)
    ((got,), none) = found.rows
    assert not none and (got.token, got.branch_probs, got.dists) == (7, (0.5, 0.25), None)
    assert got.head is not None and got.head.best.tolist() == [1, 0] and got.head.max_score == -math.inf
    assert (got.head.dist.ids.tolist(), got.head.dist.probs.tolist()) == ([2, 7], [0.25, 0.5])
    assert (got.head.dist.tail, got.head.dist.log_norm, got.head.dist.memo) == (0.25, 1.5, {})
    falling = Dist(np.array([7, 2], np.int32), np.array([0.25, 0.5]))
    short = Dist(np.array([2], np.int32), np.array([0.25, 0.5]))
    outside = RowHead(dist.kept_at(np.array([0])), np.array([1]), np.array([0.0]), 0.0, 0.0)
    for wrong in (SampledRow(7, falling), SampledRow(7, short), SampledRow(7, head=outside), SampledRow(7, dist)):
        with pytest.raises(RemoteProtocolError):
            received(SampledRows(3, [[wrong]]))
    with pytest.raises(RemoteProtocolError):
        cut = encode(SampledRows(3, [[SampledRow(7, short)]])).replace(b"\xc4\x04\x02\0\0\0", b"\xc4\x03\x02\0\0")
        decode_with(stage_link._decoder.decode, cut)


# ---- the handshake of stages ----------------------------------------------------------------------------------------
def ends(certificate: bytes = b"certificate", seen: bytes = b"certificate") -> tuple[StageMachine, StageMachine]:
    """(dialler, listener), the dialler's claim to be the head not sent yet."""
    return (
        StageMachine(dialling_handshake("head", HEAD, seen)),
        StageMachine(stage_handshake("s1", STAGE, certificate)),
    )


def challenge_of(dialler: StageMachine, listener: StageMachine) -> bytes:
    listener.connection_made(0.0)
    return frame_of(listener.received(frame_of(dialler.connection_made(0.0)), 0.0))


def claims(dialler: StageMachine, listener: StageMachine) -> tuple[Claim, Claim]:
    """What each end claims; both are believed."""
    of_stage = claim_of(dialler.received(challenge_of(dialler, listener), 0.0))
    of_head = claim_of(listener.received(frame_of(dialler.authenticated(STAGE.public_key, 0.0)), 0.0))
    return of_stage, of_head


def test_both_ends_prove_their_keys() -> None:
    dialler, listener = ends()
    of_stage, of_head = claims(dialler, listener)
    assert of_stage.device == "s1" and of_stage.proves(STAGE.public_key) and not of_stage.proves(OTHER.public_key)
    assert of_head.device == "head" and of_head.proves(HEAD.public_key) and not of_head.proves(OTHER.public_key)
    welcome = next(frame_of([effect]) for effect in listener.authenticated(HEAD.public_key, 0.0))
    assert not dialler.is_up and dialler.received(welcome, 0.0) and dialler.is_up and listener.is_up


def test_who_passes_frames_on_between_two_connections_is_found_out_by_both() -> None:
    of_stage, of_head = claims(*ends(certificate=b"the stage's certificate", seen=b"his own"))
    assert not of_stage.proves(STAGE.public_key)
    assert not of_head.proves(HEAD.public_key)


@pytest.mark.parametrize("refusal", [CloseCode.BAD_CREDENTIAL, CloseCode.REVOKED])
def test_a_head_tells_a_stage_that_it_does_not_know_nothing_more(refusal: CloseCode) -> None:
    dialler, listener = ends()
    dialler.received(challenge_of(dialler, listener), 0.0)
    [end] = dialler.authenticated(refusal, 0.0)
    assert isinstance(end, Disconnected) and end.code == refusal
