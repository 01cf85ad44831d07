"""KV export and import: refusals, copies, exchange between backends, and wrong rows in the fake engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.core.batching.block_manager import KvPrefix, OutOfBlocks, as_floats, turned
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine, Rotates
from paceline.engine.fake import FakeEngine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.stage import load_stage
from paceline.errors import EngineError
from tests.core.dists import total_variation
from tests.engine.checkpoints import ARCHITECTURES, save
from tests.engine.conftest import DEVICE, HERE
from tests.engine.trials import assert_same, extend, scratch, sequences

PROMPT = [(5 * i * i + i) % 97 for i in range(21)]
SUBJECTS = ["fake", "hf-llama", "paged-llama", "recompute-llama"]


def exported(engine: Engine) -> KvPrefix:
    with sequences(engine) as (seq,):
        extend(engine, seq, PROMPT)
        return engine.export_kv(seq, PROMPT)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_that_do_not_fit_are_refused_and_change_nothing(subject: str, load: Callable[[str], Engine]) -> None:
    engine = load(subject)
    rows = exported(engine)
    foreign = [replace(rows, model="another"), replace(rows, tokens=(10_000, *PROMPT[1:]))]
    foreign += [] if subject.startswith("recompute") else [replace(rows, keys=rows.keys[..., :-1])]
    with sequences(engine, 2) as (seq, known):
        extend(engine, known, PROMPT[:3])
        for other in foreign:
            with pytest.raises(EngineError):
                engine.import_kv(seq, other)
            engine.check()
        with pytest.raises(EngineError, match="exists already"):
            engine.import_kv(known, rows)
        assert engine.length(seq) == 0
        engine.import_kv(seq, rows)
        assert engine.length(seq) == len(PROMPT)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_only_committed_rows_are_exported(subject: str, load: Callable[[str], Engine]) -> None:
    engine = load(subject)
    with sequences(engine) as (seq,):
        with pytest.raises(EngineError):
            engine.export_kv(seq, PROMPT)
        extend(engine, seq, PROMPT[:4])
        extend(engine, seq, PROMPT[4:6], parents=[-1, 0])
        with pytest.raises(EngineError):
            engine.export_kv(seq, PROMPT[:6])
        assert engine.export_kv(seq, PROMPT[:4]).tokens == tuple(PROMPT[:4])


@pytest.mark.parametrize("subject", SUBJECTS)
def test_imported_rows_are_a_copy(subject: str, load: Callable[[str], Engine]) -> None:
    """The rows may be a view of a file that is later deleted or overwritten."""
    engine = load(subject)
    rows = exported(engine)
    with sequences(engine) as (seq,):
        engine.import_kv(seq, rows)
        np.asarray(rows.keys)[...] = 0
        np.asarray(rows.values)[...] = 0
        found = extend(engine, seq, [1, 2])
    assert_same(found, scratch(engine, [*PROMPT, 1, 2])[-2:])


@pytest.mark.parametrize("backends", [("hf", "paged"), ("paged", "hf")])
def test_two_backends_of_one_model_read_each_others_rows(
    backends: tuple[str, str], load: Callable[[str], Engine]
) -> None:
    origin, engine = (load(f"{backend}-gemma3") for backend in backends)
    with sequences(engine) as (seq,):
        engine.import_kv(seq, exported(origin))
        found = extend(engine, seq, [3, 4])
    assert_same(found, scratch(engine, [*PROMPT, 3, 4])[-2:])


def test_bfloat16_rows_come_back_bit_for_bit(checkpoint: Callable[[str], Path]) -> None:
    engine = load_engine(
        checkpoint("qwen2"), EngineOptions(backend="paged", dtype="bfloat16", device=str(DEVICE), kv_rows=64), name="q"
    )
    rows = exported(engine)
    assert rows.dtype == "bfloat16" and rows.keys.dtype == np.uint16 and rows.num_bytes == 2 * 2 * 2 * 2 * 8 * 21
    with sequences(engine) as (seq,):
        engine.import_kv(seq, rows)
        again = engine.export_kv(seq, PROMPT)
    assert np.array_equal(rows.keys, again.keys) and np.array_equal(rows.values, again.values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_model_of_one_layer_turned_rows_are_those_that_are_computed_there(tmp_path: Path, dtype: str) -> None:
    """Its keys and values depend on a token and its position alone, so that nothing is approximate."""
    config = ARCHITECTURES["llama"]()
    config.num_hidden_layers = 1
    options = EngineOptions(backend="paged", dtype=dtype, device=str(DEVICE), kv_rows=256)
    engine = load_engine(save(config, tmp_path), options, name="llama")
    assert isinstance(engine, Rotates) and engine.frequencies
    rows = exported(engine)
    joined = rows.followed_by(rows, 4, engine.frequencies).followed_by(rows, 1, engine.frequencies)
    tokens = [*PROMPT, *PROMPT[4:], *PROMPT[1:]]
    assert joined.tokens == tuple(tokens)
    with sequences(engine, 2) as (seq, plain):
        engine.import_kv(seq, joined)
        found = extend(engine, seq, [3, 4])
        extend(engine, plain, tokens)
        fresh = as_floats(engine.export_kv(plain, tokens).keys, dtype)
    assert np.abs(as_floats(joined.keys, dtype) - fresh).max() <= (1e-4 if dtype == "float32" else 0.02) * fresh.max()
    expected = scratch(engine, [*tokens, 3, 4])[-2:]
    assert max(map(total_variation, found, expected)) <= (1e-4 if dtype == "float32" else 0.05)


@pytest.mark.parametrize(
    ("architecture", "turns"), [("qwen2windowed", True), ("phi3", True), ("gemma3", False), ("gpt2", False)]
)
def test_keys_are_turned_where_one_embedding_turns_them_all(
    architecture: str, turns: bool, load: Callable[[str], Engine]
) -> None:
    engine = load(f"paged-{architecture}")
    assert isinstance(engine, Rotates) and bool(engine.frequencies) == turns
    if turns:
        rows = exported(engine)
        back = turned(turned(rows.keys, rows.dtype, 40, engine.frequencies), rows.dtype, -40, engine.frequencies)
        assert np.abs(as_floats(back, rows.dtype) - as_floats(rows.keys, rows.dtype)).max() < 1e-4
    with pytest.raises(ValueError, match="another model"):
        exported(engine).followed_by(replace(exported(engine), model="other"), 0, (1.0,))


def small(path: Path) -> Engine:
    return load_engine(path, HERE._replace(backend="paged", kv_rows=48), name="llama")


@pytest.mark.parametrize("make", [lambda _: FakeEngine(capacity_rows=30), small], ids=["fake", "paged"])
def test_rows_without_room_are_refused(make: Callable[[Path], Engine], checkpoint: Callable[[str], Path]) -> None:
    engine = make(checkpoint("llama"))
    rows = exported(engine)
    with sequences(engine, 2) as (seq, other):
        extend(engine, other, PROMPT)
        with pytest.raises(OutOfBlocks):
            engine.import_kv(seq, rows)
        engine.check()
        assert engine.length(seq) == 0
        engine.release(other)
        engine.import_kv(seq, rows)


def test_wrong_rows_show_in_the_fake_engines_text() -> None:
    engine = FakeEngine(seed=3)
    rows = exported(engine)
    rows.keys[0, -1] += 1
    with sequences(engine) as (seq,):
        engine.import_kv(seq, rows)
        (found,) = extend(engine, seq, [101])
        with pytest.raises(EngineError):
            engine.forward(Batch((Segment(seq, len(PROMPT) + 5, (1,)),)))  # rows that were never written
    assert total_variation(found, scratch(engine, [*PROMPT, 101])[-1]) > 1e-3


def test_a_stage_imports_the_rows_of_its_own_layers_only(checkpoint: Callable[[str], Path]) -> None:
    first, second = (load_stage(checkpoint("llama"), i, i + 1, HERE._replace(kv_rows=128)) for i in range(2))
    seq, into, more = SeqId(1), SeqId(2), Segment(SeqId(1), len(PROMPT), (7, 8), logits="all")
    hidden = first.forward(Batch((Segment(seq, 0, tuple(PROMPT)),))).hidden
    second.forward(Batch((Segment(seq, 0, tuple(PROMPT)),)), hidden)
    rows = [stage.export_kv(seq, PROMPT) for stage in (first, second)]
    with pytest.raises(EngineError, match="another model"):
        first.import_kv(into, rows[1])
    first.import_kv(into, rows[0])
    second.import_kv(into, rows[1])
    outputs = []
    for each in (seq, into):
        batch = Batch((msgspec.structs.replace(more, seq=each),))
        output = second.forward(batch, first.forward(batch).hidden).output
        assert output is not None
        outputs.append(output.dists[0])
    assert_same(outputs[1], outputs[0])
