"""The links of a pipeline as machines: rows, frames, credits, hostile bytes."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.errors import LocalProtocolError, RemoteProtocolError
from paceline.wire.messages import Frame
from paceline.wire.stages.messages import (
    ROW_FORMATS,
    Codec,
    Forget,
    HiddenRows,
    PruneRows,
    RowFormat,
    RunBatch,
    StagePing,
    batch_from_wire,
    batch_to_wire,
    kept_of,
    pack_rows,
    unpack_rows,
    without_others,
)
from paceline.wire.stages.pipe import Bulk, Pipe

KINDS = Codec(StagePing, RunBatch, PruneRows, Forget)
HEADERS = Codec(HiddenRows)
WINDOW = 64


def pipe(**limits: int) -> Pipe:
    return Pipe(KINDS, HEADERS, **({"window": WINDOW, "max_bulk": 1000, "max_message": 4000} | limits))


def flow(sender: Pipe) -> bytes:
    """Everything that may be written now."""
    frames = []
    while (frame := sender.next_frame()) is not None:
        frames.append(frame)
    return b"".join(frames)


def cut(data: bytes, random: list[int]) -> list[bytes]:
    parts, at = [], 0
    for size in random:
        parts.append(data[at : at + size])
        at += size
    return [*parts, data[at:]]


# ---- rows -----------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40), st.sampled_from(ROW_FORMATS))
def test_rows_come_back_rounded_to_their_format_and_then_unchanged(numbers: list[float], format: RowFormat) -> None:
    rows = np.array(numbers, dtype=np.float32).reshape(len(numbers), 1)
    once = unpack_rows(pack_rows(rows, format), format, len(numbers), 1)
    assert np.array_equal(unpack_rows(pack_rows(once, format), format, len(numbers), 1), once)
    if format == "float32":
        assert np.array_equal(once, rows)
    bits = {"float32": 0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[format]
    for before, after in zip(rows[:, 0], once[:, 0], strict=True):
        inside = 2.0**-14 < abs(before) < 60_000 if format == "float16" else 1e-37 < abs(before) < 3e38
        if inside:
            assert math.isclose(before, after, rel_tol=bits)


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_is_rounded_as_torch_rounds_it(bits: int) -> None:
    import torch

    number = np.array([[bits]], dtype=np.uint32).view(np.float32)
    found = np.frombuffer(pack_rows(number, "bfloat16"), "<u2")[0]
    expected = torch.from_numpy(number.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)[0, 0]
    assert found == expected or np.isnan(number[0, 0])


@given(st.binary(max_size=40), st.sampled_from(ROW_FORMATS), st.integers(0, 5), st.integers(0, 5))
def test_bytes_of_another_size_are_refused(data: bytes, format: RowFormat, rows: int, width: int) -> None:
    size = rows * width * {"float32": 4, "bfloat16": 2, "float16": 2}[format]
    if len(data) == size:
        assert unpack_rows(data, format, rows, width).shape == (rows, width)
    else:
        with pytest.raises(RemoteProtocolError):
            unpack_rows(data, format, rows, width)


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
    message = KINDS.decode(Codec.encode(batch_to_wire(7, batch)))
    assert isinstance(message, RunBatch) and message.ticket == 7
    found = batch_from_wire(message)
    assert [(s.seq, s.start, s.tokens, s.parents, s.ids) for s in found.segments] == [
        (s.seq, s.start, s.tokens, s.parents, s.ids) for s in batch.segments
    ]
    assert [s.logits_rows() for s in found.segments] == [s.logits_rows() for s in batch.segments]
    kept = [
        None
        if segment.parents is None or data.draw(st.booleans())
        else sorted(data.draw(st.sets(st.sampled_from(range(len(segment.tokens))))))
        for segment in batch.segments
    ]
    left = without_others(found, kept)
    whole = [
        None if rows is not None and len(rows) == len(segment.tokens) else rows
        for rows, segment in zip(kept, batch.segments, strict=True)
    ]
    assert kept_of(found, left) == whole
    for segment in left.segments:
        asked = next(each for each in batch.segments if each.seq == segment.seq)
        names = {asked.node_ids[row] for row in asked.logits_rows()} if asked.parents is not None else None
        if names is not None:
            wanted = [segment.node_ids[row] for row in segment.logits_rows()]
            assert wanted == [name for name in segment.node_ids if name in names]


@pytest.mark.parametrize("kept", [[], [[0, 0]], [[1, 0]], [[9]], [None, None]])
def test_rows_that_a_batch_has_not_are_refused(kept: list[list[int] | None]) -> None:
    batch = Batch((Segment(SeqId(1), 0, (1, 2), (-1, 0)),))
    with pytest.raises(RemoteProtocolError):
        without_others(batch, kept)


# ---- the pipe -------------------------------------------------------------------------------------------------------
Sent = st.lists(st.one_of(st.integers(0, 30), st.binary(max_size=300)), max_size=12)


@given(Sent, st.lists(st.integers(0, 80)))
def test_everything_comes_in_order_however_it_is_cut(sent: list[int | bytes], sizes: list[int]) -> None:
    a, b = pipe(), pipe()
    messages: list[Frame] = []
    bulks: list[tuple[Frame, bytes]] = []
    for number, each in enumerate(sent):
        if isinstance(each, int):
            messages.append(Forget([each]))
            a.send(messages[-1])
        else:
            bulks.append((HiddenRows(1, number, [], None), each))
            a.send_bulk(*bulks[-1])
    found_messages: list[Frame] = []
    found_bulks: list[tuple[Frame, bytes]] = []
    for _ in range(500):
        written = flow(a)
        for part in cut(written, sizes):
            for found in b.received(part):
                if isinstance(found, Bulk):
                    found_bulks.append((found.header, bytes(found.payload)))
                    b.taken()
                else:
                    found_messages.append(found)
        back = flow(b)
        for part in cut(back, sizes):
            assert not a.received(part)
        if not written and not back:
            break
    assert found_messages == messages and found_bulks == bulks
    assert a.pending_bulk == 0


def test_a_full_pipe_holds_rows_back_but_no_message() -> None:
    a, b = pipe(), pipe()
    for ticket in range(4):
        a.send_bulk(HiddenRows(1, ticket, [], None), bytes(50))
    seen = [found for found in b.received(flow(a)) if isinstance(found, Bulk)]
    assert len(seen) == 1, "one message, and what of the next fits into a window"
    a.received(flow(b))
    more = b.received(flow(a))
    assert not flow(b) or len(more) <= 1
    held = a.pending_bulk
    assert held > 0
    a.send(PruneRows(1, [0], [], 3))
    assert [type(found) for found in b.received(flow(a))] == [PruneRows], "it overtakes rows that have no credit"
    assert a.pending_bulk == held
    total = len(seen) + sum(isinstance(found, Bulk) for found in more)
    for _ in range(20):
        if total:
            b.taken()
            total -= 1
        a.received(flow(b))
        total += sum(isinstance(found, Bulk) for found in b.received(flow(a)))
    assert a.pending_bulk == 0


def test_a_message_larger_than_the_window_passes_while_it_is_waited_for() -> None:
    a, b = pipe(), pipe()
    a.send_bulk(HiddenRows(1, 1, [], None), bytes(range(250)) * 3)
    found: list[Frame | Bulk] = []
    for _ in range(100):
        found += b.received(flow(a))
        a.received(flow(b))
    assert len(found) == 1 and isinstance(found[0], Bulk) and bytes(found[0].payload) == bytes(range(250)) * 3


def test_what_is_not_taken_is_bounded() -> None:
    a, b = pipe(max_bulk=100), pipe(max_bulk=100)
    for ticket in range(50):
        a.send_bulk(HiddenRows(1, ticket, [], None), bytes(100))
    for _ in range(200):
        b.received(flow(a))
        a.received(flow(b))
    assert 50 * 100 - a.pending_bulk <= 100 + WINDOW


@given(st.binary(max_size=400), st.lists(st.integers(0, 50)))
def test_hostile_bytes_raise_the_protocol_error_only(data: bytes, sizes: list[int]) -> None:
    receiver = pipe()
    try:
        for part in cut(data, sizes):
            receiver.received(part)
    except RemoteProtocolError:
        pass


@given(st.data())
def test_changed_bytes_of_honest_frames_raise_the_protocol_error_only(data: st.DataObject) -> None:
    a, b = pipe(), pipe()
    a.send(batch_to_wire(1, Batch((Segment(SeqId(1), 0, (1, 2, 3), (-1, 0, 1)),))))
    a.send_bulk(HiddenRows(1, 1, [[0, 2]], None), bytes(40))
    a.send(PruneRows(1, [0, 1], [2], 5))
    frames = bytearray(flow(a))
    for _ in range(data.draw(st.integers(1, 4))):
        frames[data.draw(st.integers(0, len(frames) - 1))] = data.draw(st.integers(0, 255))
    try:
        for found in b.received(bytes(frames)):
            if isinstance(found, RunBatch):
                batch_from_wire(found)
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize(
    ("what", "frames"),
    [
        ("a chunk beyond its credit", lambda: _bulk_header(500) + _frame(2, bytes(WINDOW + 1))),
        ("a chunk of nothing", lambda: _frame(2, b"x")),
        ("a chunk beyond its message", lambda: _bulk_header(3) + _frame(2, b"1234")),
        ("a message within a message", lambda: _bulk_header(3) + _bulk_header(3)),
        ("more than a bulk message may have", lambda: _bulk_header(1001)),
        ("credit that nobody needs", lambda: _frame(3, (1).to_bytes(8, "big"))),
        ("a frame of no kind", lambda: _frame(9, b"")),
        ("an empty frame", lambda: bytes(4)),
        ("a frame too large", lambda: (5000).to_bytes(4, "big")),
        ("a message of another link", lambda: _frame(0, msgspec.msgpack.encode(["assign", 1]))),
    ],
)
def test_what_breaks_the_protocol_is_refused(what: str, frames: Callable[[], bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        pipe().received(frames())
        pytest.fail(what)


def _frame(kind: int, content: bytes) -> bytes:
    return (len(content) + 1).to_bytes(4, "big") + bytes((kind,)) + content


def _bulk_header(size: int) -> bytes:
    return _frame(1, size.to_bytes(8, "big") + Codec.encode(HiddenRows(1, 1, [], None)))


def test_what_the_other_end_would_refuse_is_not_sent() -> None:
    sender = pipe()
    with pytest.raises(LocalProtocolError):
        sender.send(Forget(list(range(100_000, 104_000))))
    with pytest.raises(LocalProtocolError):
        sender.send_bulk(HiddenRows(1, 1, [], None), bytes(1001))
