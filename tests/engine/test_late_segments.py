"""Property 11: a prune commutes with the segments that were sent before it and arrive after it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError
from tests.engine.late_segments import Sender
from tests.engine.trials import assert_same, extend, scratch, sequences

SUBJECTS = ["hf-llama", "paged-mistral", "tiled-llama", "recompute-llama", "stages-llama"]


def play(engine: Engine, seq: SeqId, random: Random, moves: int) -> None:
    sender = Sender(seq, random, tuple(random.randrange(90) for _ in range(random.randint(1, 20))))
    extend(engine, seq, sender.prompt)

    def arrive() -> None:
        segment = sender.lagging.popleft()
        output = engine.forward(Batch((segment,)))
        rows = sender.wanted(segment)
        scored = output.scored[0] if output.scored and output.scored[0] is not None else range(len(segment.tokens))
        assert tuple(scored) == rows
        names = [segment.node_ids[row] for row in rows]
        assert_same(output.dists[0], [scratch(engine, sender.text(name))[-1] for name in names])
        engine.check()

    sender.grow()
    for _ in range(moves):
        if random.random() < 0.6:
            sender.grow()
        else:
            while sender.lagging and random.random() < 0.4:
                arrive()
            engine.prune(seq, *sender.prune())
            engine.check()
    while sender.lagging:
        arrive()
    assert engine.length(seq) == sender.length
    if sender.live:
        sender.live = []
        engine.prune(seq, ())
    text = sender.committed_text()
    assert_same(extend(engine, seq, (5, 6)), scratch(engine, [*text, 5, 6])[-2:])


@pytest.mark.parametrize("subject", SUBJECTS)
@settings(max_examples=8)
@given(seed=st.integers(0, 10**9))
def test_property_11_a_prune_commutes_with_late_segments(
    subject: str, seed: int, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine) as (seq,):
        play(engine, seq, Random(seed), 8)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_property_11_on_tables_with_long_histories(seed: int) -> None:
    engine = FakeEngine()
    with sequences(engine) as (seq,):
        play(engine, seq, Random(seed), 25)


def test_a_prune_may_overtake_a_whole_sequence() -> None:
    engine = FakeEngine()
    with sequences(engine) as (seq,):
        engine.prune(seq, (0, 2), (3,), horizon=3)
        extend(engine, seq, (7, 8))
        late = Segment(seq, 2, (1, 2, 3, 4), (-1, -1, 0, 2), "all", (0, 1, 2, 3))
        output = engine.forward(Batch((late,)))
        assert output.scored == ((0, 2, 3),) and engine.length(seq) == 5
        expected = scratch(engine, (7, 8, 1, 3, 4))
        assert_same(output.dists[0], expected[2:])
        engine.prune(seq, (3,))
        assert_same(extend(engine, seq, (9,)), scratch(engine, (7, 8, 1, 3, 4, 9))[-1:])


def test_what_no_sender_may_name_is_refused() -> None:
    engine = FakeEngine()
    with sequences(engine) as (seq,):
        extend(engine, seq, (7, 8))
        extend(engine, seq, (1, 2, 3), parents=(-1, 0, 1))
        for keep, live, horizon in [
            ((0, 5), (), None),  # nothing is on its way
            ((0, 5), (), 4),  # beyond what was sent
            ((0, 5), (1,), 6),  # beside a path whose end is still to come
            ((5, 0), (), 6),
            ((), (0, 9), 8),
        ]:
            with pytest.raises(EngineError):
                engine.prune(seq, keep, live, horizon)
        engine.prune(seq, (0,), (4,), horizon=5)
        for keep, live in [((5,), ()), ((), (3,)), ((1,), ())]:  # dropped before
            with pytest.raises(EngineError):
                engine.prune(seq, keep, live, horizon=5)
        with pytest.raises(EngineError, match="parent"):
            engine.forward(Batch((Segment(seq, 5, (1, 2), (1, 1), "all", (3, 4)),)))
        assert engine.forward(Batch((Segment(seq, 5, (1, 2), (0, 0), "all", (3, 4)),))).scored == ((1,),)
