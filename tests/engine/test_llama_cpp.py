"""GGUF files on llama.cpp: what is exact and said to be, prompts that begin alike, and rows that cannot be taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from paceline.core.batching.block_manager import OutOfBlocks
from paceline.core.batching.segment import Batch, Segment
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine
from paceline.engine.llama_cpp import library
from paceline.engine.llama_cpp.engine import load_gguf
from paceline.engine.llama_cpp.library import LlamaContext, Scores, Stretch
from paceline.errors import EngineError
from paceline.hub.gguf import described
from paceline.hub.quantize import write_quantized
from tests.engine.conftest import FORMATS, gguf_engine
from tests.engine.trials import extend, scratch, sequences
from tests.hub.test_gguf import write_gguf

TEXT = [(5 * i * i + i) % 97 for i in range(90)]


def are_equal(found: tuple[Dist, ...] | list[Dist], expected: tuple[Dist, ...]) -> bool:
    return all(np.array_equal(one.probs, other.probs) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_however_its_text_is_divided_and_whatever_is_beside_it(
    kind: GGMLQuantizationType, load: Callable[[str], Engine]
) -> None:
    engine = load(f"{kind.name.lower()}-llama")
    assert (engine.info.dtype, engine.info.is_exact) == (kind.name.lower(), True)
    whole = scratch(engine, TEXT)
    with sequences(engine, 3) as (seq, other, third):
        found: list[Dist] = []
        for start, stop in itertools.pairwise((0, 1, 2, 4, 7, 63, 64, 90)):
            beside = [Segment(each, engine.length(each), (7,) * (stop - start)) for each in (other, third)]
            batch = Batch((beside[0], Segment(seq, start, tuple(TEXT[start:stop]), logits="all"), beside[1]))
            found += engine.forward(batch).dists[1]
    assert are_equal(found, whole)


def test_a_format_whose_rows_differ_when_they_are_computed_alone_is_made_exact_by_a_second_row(
    checkpoint: Callable[[str], Path],
) -> None:
    engine = gguf_engine(checkpoint("llama"), GGMLQuantizationType.F32)
    assert (engine.info.dtype, engine.info.is_exact) == ("f32", True)
    with sequences(engine) as (seq,):
        found = [extend(engine, seq, [token])[0] for token in TEXT[:30]]
    assert are_equal(found, scratch(engine, TEXT[:30]))


def test_what_was_measured_is_believed_under_the_same_conditions_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_engine(checkpoint("llama"), GGMLQuantizationType.F32)
    measured: list[int] = []
    monkeypatch.setattr(LlamaContext, "exactness", lambda _: measured.append(1) or (1, False))
    assert gguf_engine(checkpoint("llama"), GGMLQuantizationType.F32).info.is_exact and not measured
    assert not gguf_engine(checkpoint("llama"), GGMLQuantizationType.F32, threads=2).info.is_exact and measured
    for kept in checkpoint("llama").parent.glob("cache/paceline/llama.cpp/*"):
        kept.unlink()  # what is made up here is for no other test


def test_a_cache_that_grows_has_the_bits_of_one_that_was_made_whole(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    write_gguf(checkpoint("llama"), tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    grown, whole = (LlamaContext(tmp_path / "model.gguf", rows=699, threads=1, grows=grows) for grows in (True, False))
    grown.is_exact = whole.is_exact = True
    whole.resize(699, 2, ())
    grown.resize(0, 2, ())
    for start in range(0, 672, 28):
        stretches = [
            Stretch(stream, start, [(stream + at * at) % 97 for at in range(start, start + 28)], [True] * 28)
            for stream in range(2)
        ]
        if start + 28 > grown.capacity:
            grown.resize(2 * grown.capacity, 2, (0, 1))
        assert np.array_equal(grown.decode(stretches), whole.decode(stretches))
    assert grown.length(1) == 672


@pytest.mark.parametrize("kind", (GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0), ids=lambda kind: kind.name)
def test_threads_that_come_and_go_change_no_bit(
    kind: GGMLQuantizationType, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind the rows from which several share a row's attention: of single rows, and of a few at once."""
    write_gguf(checkpoint("llama"), tmp_path / "model.gguf", kind=kind)
    context = LlamaContext(tmp_path / "model.gguf", rows=400, threads=3)
    context.resize(400, 1, ())
    context.least_rows, context.is_exact = context.exactness()
    assert context.is_exact
    tokens = [(5 * i * i + i) % 97 for i in range(360)]
    counts = itertools.chain([3] * 9, itertools.cycle([1, 3, 2]))
    used: list[int] = []
    monkeypatch.setattr(library, "free_cores", lambda: used.append(next(counts)) or used[-1])
    found = []
    for sizes in (40,), (1, 1, 1, 7, 11):
        rows: list[Scores | None] = []
        for size in itertools.cycle(sizes):
            if (start := len(rows)) == len(tokens):
                break
            given = tokens[start : start + size]
            (scores,) = context.decode([Stretch(0, start, given, [True] * len(given))])
            rows += scores
        found.append(np.array(rows))
        context.shorten(0, 0)
    assert np.array_equal(*found) and set(used) == {1, 2, 3}


def test_a_prompt_begins_with_the_rows_of_its_salt_whether_their_sequence_has_ended_or_not(
    load: Callable[[str], Engine],
) -> None:
    engine = load("q8_0-llama")
    with sequences(engine, 4) as (first, second, third, other):
        assert engine.begin(first, TEXT[:60], "salt") == 0
        extend(engine, first, TEXT[:60])
        extend(engine, first, TEXT[60:64], parents=[-1, 0, 1, 2])
        assert engine.begin(second, TEXT, "salt") == 60  # none of the open tree
        assert are_equal(extend(engine, second, TEXT[60:]), scratch(engine, TEXT)[60:])
        engine.release(second)
        assert engine.begin(third, TEXT, "salt") == 89
        assert engine.begin(other, TEXT, "another") == 0
        assert are_equal(extend(engine, third, TEXT[89:]), scratch(engine, TEXT)[89:])
        engine.check()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_streams_grow_in_number_and_length_with_what_they_hold(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_quantized(checkpoint(name), tmp_path / "model.gguf", "q8_0")
    model = described(tmp_path / "model.gguf", checkpoint(name))
    engine = load_gguf(model, name=name, kv_rows=12 * 96, threads=1)
    whole = scratch(engine, TEXT)
    with sequences(engine, 9) as (ended, *seqs):
        engine.begin(ended, TEXT, "salt")
        found = [extend(engine, seq, TEXT[:10]) for seq in (ended, *seqs[:2])]
        rows = engine.export_kv(ended, TEXT[:10])
        engine.release(ended)
        engine.import_kv(ended, rows)
        for start, stop in itertools.pairwise((10, 17, 40, 90)):
            for each, seq in zip(found, (ended, *seqs[:2]), strict=True):
                each += extend(engine, seq, TEXT[start:stop])
            engine.check()
        found += [extend(engine, seq, TEXT[:50]) for seq in seqs[2:]]
        engine.check()
    for each in found:
        assert are_equal(each, whole[: len(each)])


def test_stored_rows_that_were_cut_are_computed_again(load: Callable[[str], Engine]) -> None:
    engine = load("q8_0-llama")
    with sequences(engine, 3) as (seq, into, again):
        extend(engine, seq, TEXT[:20])
        rows = engine.export_kv(seq, TEXT[:20])
        for keys in (rows.keys[..., : rows.keys.shape[-1] // 2], np.zeros_like(rows.keys)):
            with pytest.raises(EngineError, match="cut"):
                engine.import_kv(into, replace(rows, keys=keys))
        half = replace(rows, tokens=rows.tokens[:10], keys=rows.keys.reshape(1, 10, 1, -1), values=rows.values[:, :10])
        assert engine.begin(into, TEXT[:30], "stored", half) == 0
        assert engine.begin(again, TEXT[:30], "stored", rows) == 20
        engine.check()


def test_a_sequence_without_a_free_stream_is_refused_and_nothing_else_is_disturbed(
    load: Callable[[str], Engine],
) -> None:
    engine = load("q8_0-llama")
    free = engine.free_rows()
    assert free is not None
    with sequences(engine, free // engine.block_size + 1) as seqs:
        engine.forward(Batch(tuple(Segment(seq, 0, (3, 1)) for seq in seqs[:-1])))
        assert engine.free_rows() == 0
        with pytest.raises(OutOfBlocks):
            engine.forward(Batch((Segment(seqs[0], 2, (4,)), Segment(seqs[-1], 0, (3,)))))
        engine.check()
        assert engine.length(seqs[0]) == 2
