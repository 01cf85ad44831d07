"""Refusals of all engines: the same errors, and no change of state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine
from paceline.engine.fake import FakeEngine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.stage import load_stage
from paceline.errors import ConfigError, EngineError
from tests.engine.checkpoints import POSITIONS
from tests.engine.trials import assert_same, extend, scratch, sequences

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def refuses(engine: Engine, *segments: Segment) -> None:
    lengths = {segment.seq: engine.length(segment.seq) for segment in segments}
    with pytest.raises(EngineError):
        engine.forward(Batch(segments))
    engine.check()
    assert lengths == {seq: engine.length(seq) for seq in lengths}


@pytest.mark.parametrize("subject", ["fake", "hf-llama", "paged-llama", "recompute-llama"])
class TestEveryEngine:
    @pytest.fixture
    def engine(self, subject: str, load: Callable[[str], Engine]) -> Engine:
        return load(subject)

    def test_a_segment_must_continue_what_was_written(self, engine: Engine) -> None:
        with sequences(engine, 2) as (seq, other):
            refuses(engine, Segment(seq, 5, (1,)))  # rows that were never written
            extend(engine, seq, PROMPT)
            refuses(engine, Segment(seq, 4, (1,)))  # rows that would be written twice
            refuses(engine, Segment(other, 0, (1, 2)), Segment(seq, 9, (1,)))  # one bad segment refuses all
            assert_same(extend(engine, seq, [7]), scratch(engine, [*PROMPT, 7])[-1:])

    def test_a_tree_must_be_pruned_or_dropped_first(self, engine: Engine) -> None:
        with sequences(engine) as (seq,):
            extend(engine, seq, PROMPT)
            extend(engine, seq, [1, 2, 3], parents=[-1, 0, 0])
            refuses(engine, Segment(seq, 11, (1,)))
            for keep in ([1], [0, 1, 2], [2, 0], [3]):
                with pytest.raises(EngineError, match="path"):
                    engine.prune(seq, keep)
            with pytest.raises(EngineError):
                engine.truncate(seq, 9)
            engine.prune(seq, [0, 2])
            with pytest.raises(EngineError, match="no tree"):
                engine.prune(seq, [0])
            assert_same(extend(engine, seq, [7]), scratch(engine, [*PROMPT, 1, 3, 7])[-1:])

    @pytest.mark.parametrize("after_a_prune", [False, True])
    def test_a_segment_that_does_not_grow_the_open_tree_is_refused(self, engine: Engine, after_a_prune: bool) -> None:
        with sequences(engine) as (seq,):
            refuses(engine, Segment(seq, 2, (1,), (1,), ids=(2,)))  # the sequence is unknown
            extend(engine, seq, PROMPT)
            refuses(engine, Segment(seq, 8, (1,), (0,), ids=(1,)))  # the prompt's last row is no part of a tree
            if after_a_prune:
                extend(engine, seq, [6, 1, 9, 2, 3], parents=[-1, 0, 0, 1, 1])
                engine.prune(seq, [0], [1, 3, 4])
            else:
                extend(engine, seq, [6])
                extend(engine, seq, [1, 2, 3], parents=[-1, 1, 1], ids=[1, 3, 4])
            for parent, name in [(1, 3), (1, 4), (0, 2), (2, 5), (5, 6), (7, 9)]:
                if (parent, after_a_prune) != (0, True):  # the last committed row may be named as well
                    refuses(engine, Segment(seq, 12, (1,), (parent,), ids=(name,)))
            for start in (9, 11, 13):
                refuses(engine, Segment(seq, start, (1,), (4,), ids=(5,)))
            refuses(engine, Segment(seq, 12, (engine.info.vocab_size,), (4,), ids=(5,)))
            found = extend(engine, seq, [4], parents=[4], ids=[5])
            assert_same(found, scratch(engine, [*PROMPT, 6, 1, 3, 4])[-1:])

    def test_rows_that_stay_open_must_be_ascending_and_connected(self, engine: Engine) -> None:
        with sequences(engine) as (seq,):
            extend(engine, seq, PROMPT)
            extend(engine, seq, [1, 2, 3], parents=[-1, 0, 0])
            extend(engine, seq, [4, 5, 6], parents=[2, 3, -1], ids=[3, 4, 5])
            for keep, rest in [
                ([0], [0]),  # in both
                ([0], [2, 1]),
                ([0], [1, 1]),
                ([0], [3]),  # its parent is dropped
                ([0, 2], [1, 3]),
                ([0, 2], [3, 4, 5]),  # a root beside what is committed
                ([0], [6]),
                ([], [-1]),
                ([], [1]),
            ]:
                with pytest.raises(EngineError, match="stay open"):
                    engine.prune(seq, keep, rest)
            with pytest.raises(EngineError, match="path"):
                engine.prune(seq, [2], [3])
            assert engine.length(seq) == 14
            engine.check()
            engine.prune(seq, [0, 2], [3, 4])
            with pytest.raises(EngineError):
                engine.truncate(seq, 11)
            found = extend(engine, seq, [7], parents=[4], ids=[6])
            assert_same(found, scratch(engine, [*PROMPT, 1, 3, 4, 5, 7])[-1:])
            engine.truncate(seq, 10)
            assert_same(extend(engine, seq, [7]), scratch(engine, [*PROMPT, 1, 3, 7])[-1:])

    def test_positions_end_where_the_model_ends(self, engine: Engine) -> None:
        with sequences(engine) as (seq,):
            refuses(engine, Segment(seq, 0, (5,) * (POSITIONS + 1)))
            extend(engine, seq, [5] * POSITIONS)
            refuses(engine, Segment(seq, POSITIONS, (5,)))

    def test_tokens_must_be_in_the_vocabulary(self, engine: Engine) -> None:
        with sequences(engine) as (seq,):
            refuses(engine, Segment(seq, 0, (engine.info.vocab_size,)))
            refuses(engine, Segment(seq, 0, (-1,)))

    def test_rows_that_do_not_exist_are_not_truncated(self, engine: Engine) -> None:
        with sequences(engine) as (seq,):
            extend(engine, seq, PROMPT)
            for length in (-1, 9):
                with pytest.raises(EngineError):
                    engine.truncate(seq, length)
            assert engine.length(seq) == 8

    def test_an_unknown_sequence_is_released_in_silence(self, engine: Engine) -> None:
        engine.release(SeqId(999_999_998))
        engine.check()

    def test_no_scored_rows_give_no_distributions(self, engine: Engine) -> None:
        with sequences(engine) as (seq,):
            assert engine.forward(Batch((Segment(seq, 0, (1, 2), logits="none"),))).dists == ((),)


@pytest.fixture(params=["fake", "paged"])
def small(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Engine:
    """An engine with 64 rows of KV cache."""
    if request.param == "fake":
        return FakeEngine(capacity_rows=64)
    return load_engine(checkpoint("llama"), EngineOptions(backend="paged", kv_rows=64), name="llama")


def test_out_of_memory_refuses_the_whole_batch_and_harms_nothing(small: Engine) -> None:
    with sequences(small, 3) as (seq, other, third):
        extend(small, seq, PROMPT)
        extend(small, other, [1] * 32)
        many = Segment(other, 32, (2,) * 40)
        refuses(small, Segment(third, 0, (5,)), many, Segment(seq, 8, (7,)))
        with pytest.raises(OutOfBlocks):  # a scheduler may wait and retry
            small.forward(Batch((many,)))
        small.release(other)
        assert small.free_rows() in (48, 56)
        found = small.forward(Batch((Segment(third, 0, (5,) * 40), Segment(seq, 8, (7,))))).dists
        small.release(third)
        assert_same(found[1], scratch(small, [*PROMPT, 7])[-1:])


def test_a_tree_that_cannot_grow_for_lack_of_memory_is_as_it_was(small: Engine) -> None:
    with sequences(small) as (seq,):
        extend(small, seq, [1] * 40)
        extend(small, seq, [2, 3], parents=[-1, 0])
        refuses(small, Segment(seq, 42, (4,) * 30, tuple(range(1, 31)), ids=tuple(range(2, 32))))
        found = extend(small, seq, [4], parents=[1], ids=[2])
        small.prune(seq, [0], [1, 2])
        more = extend(small, seq, [5], parents=[2], ids=[3])
        small.release(seq)  # there is no room for a second one
        assert_same((*found, *more), scratch(small, [*[1] * 40, 2, 3, 4, 5])[-2:])


def test_an_architecture_that_paged_cannot_serve_falls_back_with_one_line(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint("mamba")
    with caplog.at_level("INFO", logger="paceline.engine"):
        engine = load_engine(directory, name="mamba")
    assert engine.info.backend == "hf"
    lines = [record.getMessage() for record in caplog.records if "slower than paged" in record.getMessage()]
    assert len(lines) == 1 and "MambaForCausalLM" in lines[0]
    with pytest.raises(ConfigError, match="Use auto or hf"):
        load_engine(directory, EngineOptions(backend="paged"), name="mamba")
    with sequences(engine) as (seq,):
        extend(engine, seq, PROMPT)
        found = extend(engine, seq, [1, 2, 3], parents=[-1, 0, 0])
        engine.prune(seq, [0, 2])
        after = extend(engine, seq, [4])
    assert_same(found[2:], scratch(engine, [*PROMPT, 1, 3])[-1:])
    assert_same(after, scratch(engine, [*PROMPT, 1, 3, 4])[-1:])


def test_stages_refuse_spans_and_rows_that_do_not_fit(checkpoint: Callable[[str], Path]) -> None:
    directory = checkpoint("llama")
    for first, stop in ((-1, 1), (1, 1), (0, 3)):
        with pytest.raises(ConfigError, match="span"):
            load_stage(directory, first, stop)
    first_stage, last = (load_stage(directory, i, i + 1, EngineOptions(kv_rows=64)) for i in (0, 1))
    batch = Batch((Segment(SeqId(1), 0, (1, 2)),))
    with pytest.raises(EngineError, match="hidden row"):
        last.forward(batch)
    hidden = first_stage.forward(batch).hidden
    assert hidden is not None and hidden.shape == (2, 32)
    for bad in (hidden[:1], hidden[:, :7]):
        with pytest.raises(EngineError):
            last.forward(batch, bad)
    last.check()
    assert last.length(SeqId(1)) == 0 and last.free_rows() == 64
