"""What a head sends to empty stages: afterwards they hold what they would hold had none been lost."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine, Output
from paceline.engine.fake import FakeEngine
from paceline.runtime.stages.history import AGAIN, Entry, History, Imported
from paceline.wire.stages.messages import PruneRows, ReleaseRows, RunBatch, TruncateRows
from tests.engine.late_segments import Sender

POSITIONS = 4096


def fresh() -> FakeEngine:
    return FakeEngine(seed=3, max_positions=POSITIONS, vocab_size=257)


def history() -> History:
    return History(257, POSITIONS)


def unneeded(told: History, *segments: Segment) -> None:
    """A batch whose result is not needed any more."""
    told.sent(RunBatch(77, segments))
    told.settle(77)


def do(engine: Engine, entry: Entry) -> Output | None:
    match entry:
        case RunBatch(segments=segments):
            return engine.forward(Batch(segments))
        case PruneRows(seq=seq, keep=keep, live=live, horizon=horizon):
            engine.prune(SeqId(seq), keep, live, horizon)
        case TruncateRows(seq=seq, length=length):
            engine.truncate(SeqId(seq), length)
        case ReleaseRows(seq=seq):
            engine.release(SeqId(seq))
        case Imported():
            raise AssertionError("a replay computes what was imported")
    return None


def assert_equal(one: Output, other: Output) -> None:
    for a, b in zip(one.dists, other.dists, strict=True):
        assert len(a) == len(b) and all(np.array_equal(x.probs, y.probs) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_after_any_course_of_segments_and_prunes_stages_can_be_built_up_again(seed: int) -> None:
    random = Random(seed)
    told, engine = history(), fresh()
    results: dict[int, Output] = {}
    needed: deque[int] = deque()
    ticket = 0

    def run(entry: Entry) -> None:
        nonlocal ticket
        if isinstance(entry, RunBatch):
            ticket += 1
            entry = RunBatch(ticket, entry.segments)
            needed.append(ticket)
        told.sent(entry)
        if (output := do(engine, entry)) is not None:
            results[ticket] = output

    senders = [
        Sender(SeqId(i), random, tuple(random.randrange(90) for _ in range(random.randint(1, 5)))) for i in (1, 2)
    ]
    for sender in senders:
        run(RunBatch(0, (Segment(sender.seq, 0, sender.prompt),)))
    for _ in range(random.randint(0, 20)):
        sender = random.choice(senders)
        if random.random() < 0.6 or not sender.live:
            sender.grow()
            run(RunBatch(0, (sender.lagging.popleft(),)))
        else:
            keep, live, horizon = sender.prune()
            last = None if horizon is None else max(horizon, *sender.nodes)
            run(PruneRows(sender.seq, tuple(keep), tuple(live), last))
        while needed and random.random() < 0.5:
            told.settle(needed.popleft())
        told.check()

    again = fresh()
    for entry in told.replay():
        output = do(again, entry)
        if isinstance(entry, RunBatch) and entry.ticket < AGAIN:
            assert output is not None
            assert_equal(output, results[entry.ticket])
            assert entry.ticket in told._needed
    for sender in senders:
        assert again.length(sender.seq) == engine.length(sender.seq) == sender.length
        sender.grow()
        batch = Batch((sender.lagging.popleft(),))
        assert_equal(again.forward(batch), engine.forward(batch))
    engine.check()
    again.check()


def test_truncations_releases_and_imports_are_kept() -> None:
    told = history()
    for entry in (
        RunBatch(1, (Segment(SeqId(1), 0, (1, 2, 3)),)),
        TruncateRows(SeqId(1), 1),
        Imported(SeqId(3), (7, 8)),
        RunBatch(2, (Segment(SeqId(4), 0, (9,)),)),
        ReleaseRows(SeqId(4)),
    ):
        told.sent(entry)
    for settled in ((), (1,), (2,)):
        for ticket in settled:
            told.settle(ticket)
        engine = fresh()
        for entry in told.replay():
            do(engine, entry)
        assert [engine.length(SeqId(seq)) for seq in (1, 3, 4)] == [1, 2, 0]
        told.check()


def test_a_step_that_failed_costs_its_sequence_only_until_it_is_released() -> None:
    told = history()
    unneeded(told, Segment(SeqId(1), 5, (1,)), Segment(SeqId(2), 0, (1, 2)))
    told.sent(TruncateRows(SeqId(1), 2))
    told.sent(PruneRows(SeqId(1), (0,), (), None))
    engine = fresh()
    for entry in told.replay():
        do(engine, entry)
    assert engine.length(SeqId(1)) == 0 and engine.length(SeqId(2)) == 2
    told.sent(ReleaseRows(SeqId(1)))
    unneeded(told, Segment(SeqId(1), 0, (4, 5)))
    engine = fresh()
    for entry in told.replay():
        do(engine, entry)
    assert engine.length(SeqId(1)) == 2
