"""Steps of few rows: padded to few shapes, sent in one copy, captured when they occur again, replayed from then on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.loader import load_engine
from paceline.engine.paged.attention.backends import MAX_ROWS, Run, StepGraphs, Tiled, buckets, plain_call
from paceline.engine.paged.attention.tile_plan import Staging
from paceline.engine.paged.engine import PagedEngine
from paceline.engine.sampling.sampler import DeviceLogits
from paceline.errors import EngineError
from tests.engine.conftest import DEVICE, HERE, TILED
from tests.engine.trials import assert_same, extend, scratch, sequences


@pytest.fixture
def engine(checkpoint: Callable[[str], Path]) -> Iterator[PagedEngine]:
    options = HERE._replace(backend="paged", kv_rows=4096, attention=TILED, graphs=True)
    made = load_engine(checkpoint("llama"), options, name="llama")
    assert isinstance(made, PagedEngine)
    yield made


def graphs(engine: PagedEngine) -> StepGraphs:
    assert engine.graphs is not None
    return engine.graphs


def decode(engine: PagedEngine, seqs: list[SeqId], token: int) -> list[torch.Tensor]:
    batch = Batch(tuple(Segment(seq, engine.length(seq), (token,)) for seq in seqs))
    return [each.scores[each.first] for each in engine.forward(batch).logits if isinstance(each, DeviceLogits)]


def test_row_counts_are_few_and_pad_by_half_at_most() -> None:
    counts = buckets(MAX_ROWS)
    assert len(counts) == 14 and counts[-1] == MAX_ROWS and list(counts) == sorted(set(counts))
    assert all(above <= 2 * below for below, above in itertools.pairwise(counts))
    assert all(above <= 1.5 * below for below, above in itertools.pairwise(counts[3:]))
    assert buckets(20) == (1, 2, 4, 8, 12, 16, 20)


def test_a_shape_is_captured_once_and_then_replayed(engine: PagedEngine) -> None:
    captures = _Captures()
    with sequences(engine, 7) as seqs:
        for seq in seqs:
            extend(engine, seq, [3, 4, int(seq) % 90])
        assert isinstance(engine._attention, Tiled)
        engine.graphs = StepGraphs(engine._attention, engine._logits, captures)
        for step, count in enumerate([5, 7, 6, 5, 7]):  # all are padded to 8
            decode(engine, seqs[:count], step)
        assert (len(captures.made), captures.replays) == (1, 4)


class _Captures:
    """Counts what a GPU would capture and replay."""

    def __init__(self) -> None:
        self.made: list[Run] = []
        self.replays = 0

    def __call__(self, run: Run) -> Run:
        self.made.append(run)

        def replay() -> torch.Tensor:
            self.replays += 1
            return run()

        return replay


def test_logits_of_a_step_outlive_the_next_one(engine: PagedEngine) -> None:
    """Rows of a cut prompt and of an answer's branches are sampled steps later."""
    shared = torch.zeros(8, engine.info.vocab_size, device=DEVICE)

    def capture(run: Run) -> Run:
        def replay() -> torch.Tensor:  # a graph writes its output to the same memory each time
            found = run()
            shared[: len(found)] = found
            return shared[: len(found)]

        return replay

    graphs(engine)._capture = capture
    with sequences(engine, 2) as seqs:
        for seq in seqs:
            extend(engine, seq, [1, 2, 3])
        decode(engine, seqs, 1)
        kept = decode(engine, seqs, 2)
        copies = [each.clone() for each in kept]
        decode(engine, seqs, 3)
    assert all(torch.equal(each, copy) for each, copy in zip(kept, copies, strict=True))


def test_a_step_is_one_copy_to_the_device(engine: PagedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = Staging.send, list[int]()
    monkeypatch.setattr(Staging, "send", lambda *given: sent.append(given[1]) or send(*given))
    with sequences(engine, 3) as seqs:
        for seq in seqs:
            extend(engine, seq, [5, 6, 7])
        for step in range(3):
            before = len(sent)
            tree = Segment(seqs[2], engine.length(seqs[2]), (1, 2, 3), (-1, 0, 0), "all")
            engine.forward(Batch((*(Segment(seq, engine.length(seq), (step,)) for seq in seqs[:2]), tree)))
            assert len(sent) == before + 1
            engine.prune(seqs[2], (0, 2))


def test_what_cannot_be_captured_runs_unpadded_with_one_warning(
    engine: PagedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(_: Run) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs(engine)._capture = capture
    tokens = [4, 8, 15, 16, 23, 42]
    with sequences(engine) as (seq,):
        extend(engine, seq, tokens)
        for token in (1, 2, 3):
            decode(engine, [seq], token)
        (found,) = extend(engine, seq, [4])
    assert_same([found], scratch(engine, [*tokens, 1, 2, 3, 4])[-1:])
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        "steps are not replayed as CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(
    ("error", "seen"), [(torch.OutOfMemoryError("out of memory"), EngineError), (ValueError("Triton's"), ValueError)]
)
def test_a_forward_that_fails_leaves_the_engine_as_it_was(
    engine: PagedEngine, error: Exception, seen: type[Exception]
) -> None:
    def capture(run: Run) -> Run:
        def replay() -> torch.Tensor:
            run()
            raise error

        return replay

    with sequences(engine) as (seq,):
        extend(engine, seq, [1, 2, 3])
        graphs(engine).replays.clear()
        graphs(engine)._capture = capture
        decode(engine, [seq], 4)
        with pytest.raises(seen):
            decode(engine, [seq], 5)
        assert engine.length(seq) == 4
        engine.check()
        graphs(engine).replays.clear()
        graphs(engine)._capture = plain_call
        (found,) = extend(engine, seq, [6])
    assert_same([found], scratch(engine, [1, 2, 3, 4, 6])[-1:])


def test_padding_rows_touch_no_sequence(engine: PagedEngine) -> None:
    with sequences(engine, 3) as seqs:
        for seq in seqs:
            extend(engine, seq, list(range(int(seq) % 7, 40)))
        storage = engine._storage
        for step in range(3):
            before = storage.keys.clone()
            decode(engine, seqs, step)
            changed = (storage.keys != before).flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
            assert len(set(changed) - {storage.spare_slot}) == 3
            assert all(slot <= storage.spare_slot for slot in changed)
