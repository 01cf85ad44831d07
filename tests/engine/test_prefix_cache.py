"""Rows that stay cached, that are stored, and the pages they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from paceline.core.batching.block_manager import KvPrefix, OutOfBlocks, as_floats, turned
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Engine, Rotates
from paceline.engine.fake import FakeEngine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.paged.kv_cache import KvStorage
from paceline.engine.stage import load_stage
from paceline.errors import EngineError
from tests.core.dists import total_variation
from tests.engine.checkpoints import ARCHITECTURES, save
from tests.engine.conftest import DEVICE, HERE
from tests.engine.trials import assert_same, extend, scratch, sequences

TEXT = [(5 * i * i + i) % 97 for i in range(90)]
CACHING = ["fake", "paged-llama"]
SUBJECTS = [*CACHING, "hf-llama", "recompute-llama"]


def begun(engine: Engine, seq: SeqId, tokens: list[int], salt: str, stored: KvPrefix | None = None) -> int:
    """Rows with which a prompt begins; what follows continues like a fresh prefill."""
    rows = engine.begin(seq, tokens, salt, stored)
    assert engine.length(seq) == rows
    assert_same(extend(engine, seq, tokens[rows:])[-1:], scratch(engine, tokens)[-1:])
    engine.check()
    return rows


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_begins_with_cached_rows_continues_like_a_fresh_prefill(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine, 2) as (first, second):
        assert begun(engine, first, TEXT[:70], "owner") == 0
        assert begun(engine, second, TEXT[:50] + TEXT[60:80], "owner") == (50 if subject in CACHING else 0)
        assert_same(extend(engine, first, TEXT[70:73])[-1:], scratch(engine, TEXT[:73])[-1:])


@pytest.mark.parametrize("subject", CACHING)
def test_rows_stay_cached_after_the_end_and_a_prune_to_drafts_is_part_of_them(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine) as (seq,):
        begun(engine, seq, TEXT[:40], "turns")
        extend(engine, seq, [7, *TEXT[40:56]], parents=[-1, -1, *range(1, 16)])
        engine.prune(seq, range(1, 17))
        engine.check()
    with sequences(engine) as (seq,):
        assert begun(engine, seq, TEXT[:70], "turns") == 56


@pytest.mark.parametrize("subject", CACHING)
def test_the_last_token_is_always_left_to_compute_and_an_open_tree_or_another_salts_rows_are_never_shared(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine, 4) as (first, again, other, third):
        begun(engine, first, TEXT[:32], "ends")
        with pytest.raises(EngineError, match="exists already"):
            engine.begin(first, TEXT, "ends")
        assert engine.begin(again, TEXT[:32], "ends") == 31
        extend(engine, first, TEXT[32:64], parents=list(range(-1, 31)))
        assert engine.begin(other, TEXT[:64], "ends") == 32
        assert engine.begin(third, TEXT[:64], "another") == 0
        engine.check()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_stored_rows_are_imported_where_they_are_longer_than_what_is_cached(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine) as (seq,):
        extend(engine, seq, TEXT[:40])
        stored = engine.export_kv(seq, TEXT[:40])
    with sequences(engine, 2) as (first, second):
        assert begun(engine, first, TEXT[:50], "stored", stored) == 40
        rows = engine.begin(second, TEXT[:60], "stored", stored)
        assert rows == {"fake": 50, "paged": 48}.get(subject.split("-")[0], 40), "the first one's, unless fewer"
        engine.check()


@pytest.mark.parametrize("subject", CACHING)
def test_a_conversation_goes_on_from_its_last_row_and_another_end_of_it_from_where_they_part(
    subject: str, load: Callable[[str], Engine]
) -> None:
    turns = [TEXT[:37], TEXT[:37] + TEXT[50:83], TEXT[:37] + TEXT[50:60] + TEXT[:20]]
    for turn, known in zip((*turns, turns[1]), (0, 37, 47, len(turns[1]) - 1), strict=True):
        with sequences(load(subject)) as (seq,):
            assert begun(load(subject), seq, turn, "talk") == known


def test_cached_rows_make_room_where_memory_is_short(checkpoint: Callable[[str], Path]) -> None:
    """Memory for 8 blocks: what is cached and unused is evicted, never in the way."""
    engine = load_engine(checkpoint("llama"), EngineOptions(backend="paged", dtype="float32", kv_rows=128), name="tiny")
    for number in range(6):
        seq = SeqId(number + 1)
        engine.begin(seq, TEXT[number : number + 60], str(number))
        extend(engine, seq, TEXT[number : number + 60])
        engine.release(seq)
        engine.check()
        assert engine.free_rows() == 128
    assert engine.begin(SeqId(9), TEXT[5:65], "5") == 59
    assert engine.begin(SeqId(10), TEXT[0:60], "0") == 0, "evicted"


# ---- sequences that begin with cached rows, grow, branch, are cut and released, in any order ------------------------
ROWS = 12 * 16
BASES = [[(7 * i * i + base * i + base) % 97 for i in range(50)] for base in (1, 2)]
OWNERS = ("ann", "bob")
seqs = st.integers(1, 4).map(SeqId)


def machine(engine: Engine, reference: Engine) -> type[RuleBasedStateMachine]:
    """reference: computes every row of a prompt."""

    class Sequences(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.tokens: dict[SeqId, list[int]] = {}

        @rule(
            seq=seqs,
            base=st.sampled_from(BASES),
            length=st.integers(2, 45),
            own=st.integers(0, 5),
            salt=st.sampled_from(OWNERS),
        )
        def begin(self, seq: SeqId, base: list[int], length: int, own: int, salt: str) -> None:
            if seq in self.tokens:
                return
            wanted = [*base[:length], *range(90, 90 + own)]
            rows = engine.begin(seq, wanted, salt)
            assert 0 <= rows < len(wanted)
            self.tokens[seq] = wanted[:rows]
            self.grow(seq, wanted[rows:])

        def grow(self, seq: SeqId, more: list[int]) -> None:
            try:
                found = extend(engine, seq, more)
            except EngineError:  # memory is short: nothing has changed
                if not self.tokens[seq]:
                    self.release(seq)
                return
            self.tokens[seq] += more
            assert_same(found[-1:], scratch(reference, self.tokens[seq])[-1:])

        @precondition(lambda self: self.tokens)
        @rule(data=st.data(), count=st.integers(1, 20))
        def append(self, data: st.DataObject, count: int) -> None:
            seq = data.draw(st.sampled_from(sorted(self.tokens)))
            at = len(self.tokens[seq])
            self.grow(seq, [(3 * i + at) % 97 for i in range(count)])

        @precondition(lambda self: self.tokens)
        @rule(data=st.data(), keep=st.lists(st.integers(0, 1), max_size=2))
        def draft(self, data: st.DataObject, keep: list[int]) -> None:
            """Two branches of two rows, of which a part of one is kept."""
            seq = data.draw(st.sampled_from(sorted(self.tokens)))
            drafts, branch = [11, 12, 13, 14], data.draw(st.sampled_from([(0, 2), (1, 3)]))
            try:
                extend(engine, seq, drafts, parents=[-1, -1, 0, 1])
            except EngineError:
                return
            kept = branch[: len(keep)]
            engine.prune(seq, kept)
            self.tokens[seq] += [drafts[row] for row in kept]

        @precondition(lambda self: self.tokens)
        @rule(data=st.data())
        def truncate(self, data: st.DataObject) -> None:
            seq = data.draw(st.sampled_from(sorted(self.tokens)))
            length = data.draw(st.integers(1, len(self.tokens[seq])))
            engine.truncate(seq, length)
            del self.tokens[seq][length:]

        @rule(seq=seqs)
        def release(self, seq: SeqId) -> None:
            engine.release(seq)
            self.tokens.pop(seq, None)

        @invariant()
        def lengths_are_as_told(self) -> None:
            engine.check()
            for seq, tokens in self.tokens.items():
                assert engine.length(seq) == len(tokens)

        def teardown(self) -> None:
            for seq in list(self.tokens):
                engine.release(seq)
            engine.check()
            assert engine.free_rows() == ROWS

    return Sequences


def test_sequences_are_what_their_tokens_say(checkpoint: Callable[[str], Path], load: Callable[[str], Engine]) -> None:
    options = EngineOptions(backend="paged", dtype="float32", kv_rows=ROWS)
    engine = load_engine(checkpoint("llama"), options, name="short")
    limits = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(machine(engine, load("paged-llama")), settings=limits)


# ---- KV export and import -------------------------------------------------------------------------------------------
PROMPT = [(5 * i * i + i) % 97 for i in range(21)]
EXPORTING = ["fake", "hf-llama", "paged-llama", "recompute-llama"]


def exported(engine: Engine) -> KvPrefix:
    with sequences(engine) as (seq,):
        extend(engine, seq, PROMPT)
        return engine.export_kv(seq, PROMPT)


@pytest.mark.parametrize("subject", EXPORTING)
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


@pytest.mark.parametrize("subject", EXPORTING)
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


@pytest.mark.parametrize("subject", EXPORTING)
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


# ---- memory of the KV cache on a CPU --------------------------------------------------------------------------------
def resident_bytes(address: int) -> int:
    """Resident bytes of the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, stop = line.split(" ", 1)[0].partition("-")
        if dash:
            inside = int(first, 16) <= address < int(stop, 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")
def test_a_row_takes_pages_of_its_own_not_a_huge_page_of_every_layer() -> None:
    storage = KvStorage(4096, 16, layers=4, kv_heads=2, key_dim=64, value_dim=64, like=torch.zeros(1))
    storage.keys[:, 0] = storage.values[:, 0] = 1.0
    for tensor in (storage.keys, storage.values):
        assert tensor.nbytes > 100 << 20
        assert resident_bytes(tensor.data_ptr()) < 1 << 20
        assert not tensor[:, 1:3].any(), "masked columns must be finite"


@pytest.mark.parametrize(
    ("options", "kept"), [(EngineOptions(device="cpu"), 0), (EngineOptions(device="cpu", kv_mib=64), 80)]
)
def test_unless_memory_is_given_only_four_contexts_stay_for_later_prompts(
    options: EngineOptions, kept: int, checkpoint: Callable[[str], Path]
) -> None:
    """A context of this model is 96 rows."""
    engine = load_engine(checkpoint("llama"), options, name="tiny")
    tokens = [(7 * i) % 97 for i in range(81)]
    for number in range(6):  # of five blocks each
        seq = SeqId(number)
        engine.begin(seq, tokens, f"owner {number}")
        engine.forward(Batch((Segment(seq, 0, tuple(tokens), logits="none"),)))
        engine.release(seq)
    assert engine.begin(SeqId(110), tokens, "owner 5") == 80
    assert engine.begin(SeqId(111), tokens, "owner 0") == kept


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
