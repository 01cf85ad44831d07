"""Prefix cache: a sequence that begins with cached rows continues as a fresh prefill would, within its salt alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.batching.segment import SeqId
from paceline.engine.base import Engine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.errors import EngineError
from tests.engine.trials import assert_same, extend, scratch, sequences

TEXT = [(5 * i * i + i) % 97 for i in range(90)]
CACHING = ["fake", "paged-llama"]
SUBJECTS = [*CACHING, "hf-llama", "recompute-llama"]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_begins_with_cached_rows_continues_like_a_fresh_prefill(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine, 2) as (first, second):
        assert engine.begin(first, TEXT[:70], "owner") == 0
        extend(engine, first, TEXT[:70])
        rows = engine.begin(second, TEXT[:50] + TEXT[60:80], "owner")
        assert rows == (50 if subject in CACHING else 0)
        assert engine.length(second) == rows
        whole = TEXT[:50] + TEXT[60:80]
        assert_same(extend(engine, second, whole[rows:])[-1:], scratch(engine, whole)[-1:])
        assert_same(extend(engine, first, TEXT[70:73])[-1:], scratch(engine, TEXT[:73])[-1:])
        engine.check()


@pytest.mark.parametrize("subject", CACHING)
def test_rows_stay_cached_after_the_end_and_a_prune_to_drafts_is_part_of_them(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine) as (seq,):
        engine.begin(seq, TEXT[:40], "turns")
        extend(engine, seq, TEXT[:40])
        extend(engine, seq, [7, *TEXT[40:56]], parents=[-1, -1, *range(1, 16)])
        engine.prune(seq, range(1, 17))
        engine.check()
    with sequences(engine) as (seq,):
        rows = engine.begin(seq, TEXT[:70], "turns")
        assert rows == 56
        assert_same(extend(engine, seq, TEXT[rows:70])[-1:], scratch(engine, TEXT[:70])[-1:])


@pytest.mark.parametrize("subject", CACHING)
def test_the_last_token_is_always_left_to_compute_and_an_open_tree_is_never_shared(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine, 3) as (first, again, other):
        engine.begin(first, TEXT[:32], "ends")
        extend(engine, first, TEXT[:32])
        assert engine.begin(again, TEXT[:32], "ends") == 31
        extend(engine, first, TEXT[32:64], parents=list(range(-1, 31)))
        assert engine.begin(other, TEXT[:64], "ends") == 32
        engine.check()


@pytest.mark.parametrize("subject", CACHING)
def test_another_salt_shares_nothing(subject: str, load: Callable[[str], Engine]) -> None:
    engine = load(subject)
    with sequences(engine, 3) as (first, second, third):
        engine.begin(first, TEXT, "one")
        extend(engine, first, TEXT)
        assert engine.begin(second, TEXT, "two") == 0
        with pytest.raises(EngineError, match="exists already"):
            engine.begin(first, TEXT, "one")
        assert engine.begin(third, TEXT, "one") > 0


@pytest.mark.parametrize("subject", SUBJECTS)
def test_stored_rows_are_imported_where_they_are_longer_than_what_is_cached(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    with sequences(engine) as (seq,):
        extend(engine, seq, TEXT[:40])
        stored = engine.export_kv(seq, TEXT[:40])
    with sequences(engine, 2) as (first, second):
        assert engine.begin(first, TEXT[:50], "stored", stored) == 40
        assert_same(extend(engine, first, TEXT[40:50])[-1:], scratch(engine, TEXT[:50])[-1:])
        rows = engine.begin(second, TEXT[:60], "stored", stored)
        assert rows == {"fake": 50, "paged": 48}.get(subject.split("-")[0], 40), "the first one's, unless fewer"
        engine.check()


@pytest.mark.parametrize("subject", CACHING)
def test_a_conversation_goes_on_from_its_last_row_and_another_end_of_it_from_where_they_part(
    subject: str, load: Callable[[str], Engine]
) -> None:
    engine = load(subject)
    turns = [TEXT[:37], TEXT[:37] + TEXT[50:83], TEXT[:37] + TEXT[50:60] + TEXT[:20]]
    for turn, known in zip((*turns, turns[1]), (0, 37, 47, len(turns[1]) - 1), strict=True):
        with sequences(engine) as (seq,):
            assert engine.begin(seq, turn, "talk") == known
            assert_same(extend(engine, seq, turn[known:])[-1:], scratch(engine, turn)[-1:])
            engine.check()


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
