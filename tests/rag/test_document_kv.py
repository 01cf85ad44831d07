"""Document KV on disk: exact, shared, bounded, never wrong: what is damaged or of another text counts as missing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from paceline.core.batching.kv_prefix import CARRIERS, KvArray, KvPrefix
from paceline.rag.document_kv import FOLDER, DocumentKvStore, KvKey, text_hash
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore

MIB = 1 << 20


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> KvArray:
    size = (*shape[:-1], shape[-1] * CARRIERS[dtype].itemsize)
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8).view(CARRIERS[dtype])


def rows_of(tokens: tuple[int, ...] = (3, 1, 4), dtype: str = "float32", seed: int = 0) -> KvPrefix:
    keys, values = (random_array((2, len(tokens), 2, dim), dtype, seed + dim) for dim in (4, 5))
    return KvPrefix("fingerprint", dtype, tokens, keys, values)


def key_of(rows: KvPrefix, text: str = "a text", model: str = "model") -> KvKey:
    return KvKey(text_hash(text), model, rows.tokens)


def assert_same(found: KvPrefix | None, expected: KvPrefix) -> None:
    assert found is not None
    assert (found.model, found.dtype, found.tokens) == (expected.model, expected.dtype, expected.tokens)
    for a, b in ((found.keys, expected.keys), (found.values, expected.values)):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Ticking:
    """Each look at the clock is a second later."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("dtype", CARRIERS)
def test_rows_come_back_bit_for_bit_in_another_process_too(tmp_path: Path, dtype: str) -> None:
    rows = rows_of(dtype=dtype)
    assert DocumentKvStore(tmp_path, MIB).put(key_of(rows), rows)
    assert_same(DocumentKvStore(tmp_path, MIB).get(key_of(rows)), rows)


def test_the_files_are_safetensors_that_only_their_owner_reads(tmp_path: Path) -> None:
    rows = rows_of(dtype="bfloat16")
    DocumentKvStore(tmp_path / FOLDER, MIB).put(key_of(rows), rows)
    (file,) = (tmp_path / FOLDER).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with safe_open(file, framework="np") as stored:
        assert sorted(stored.keys()) == ["keys", "tokens", "values"]
        assert stored.get_tensor("tokens").tolist() == [3, 1, 4]


def test_nothing_else_is_taken_for_what_was_asked(tmp_path: Path) -> None:
    files, rows = DocumentKvStore(tmp_path, MIB), rows_of()
    key = key_of(rows)
    files.put(key, rows)
    for other in (replace(key, text=text_hash("b")), replace(key, model="m"), replace(key, tokens=(3, 1, 5))):
        assert files.get(other) is None
        os.link(tmp_path / key.file, tmp_path / other.file)  # even under its name
        assert other.text != key.text or files.get(other) is None
    assert_same(files.get(key), rows)


def test_the_same_text_is_one_file(tmp_path: Path) -> None:
    files, rows = DocumentKvStore(tmp_path, MIB), rows_of()
    for text in ("a text", "\n a text "):
        assert files.put(key_of(rows, text), rows)
    assert len(list(tmp_path.iterdir())) == 1


@settings(max_examples=40)
@given(where=st.floats(0, 1, exclude_max=True), cut=st.booleans(), flip=st.integers(1, 255))
def test_a_damaged_file_is_dropped_and_can_be_written_again(
    tmp_path_factory: pytest.TempPathFactory, where: float, cut: bool, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    rows = rows_of()
    key = key_of(rows)
    DocumentKvStore(folder, MIB).put(key, rows)
    path = folder / key.file
    content = bytearray(path.read_bytes())
    at = int(where * len(content))
    if cut:
        del content[at:]
    else:
        content[at] ^= flip
    path.write_bytes(content)
    files = DocumentKvStore(folder, MIB)
    found = files.get(key)
    if found is not None:  # a blank of the header may be another one
        assert_same(found, rows)
        return
    assert not path.exists()
    assert files.put(key, rows)
    assert_same(files.get(key), rows)


def test_what_was_not_used_for_longest_goes_first_and_the_bound_holds(tmp_path: Path) -> None:
    rows = [rows_of((i, 2, 3), seed=i) for i in range(6)]
    keys = [key_of(row, str(i)) for i, row in enumerate(rows)]
    probe = DocumentKvStore(tmp_path / "probe", MIB)
    probe.put(keys[0], rows[0])
    limit = 3 * probe.num_bytes()
    files = DocumentKvStore(tmp_path / "kv", limit, clock=Ticking())
    assert files.has_room(rows[0])
    for i in range(3):
        files.put(keys[i], rows[i])
        assert files.get(keys[i]) is not None
    assert files.get(keys[0]) is not None  # used again: now 1 is the oldest
    assert not files.has_room(rows[3])
    files.put(keys[3], rows[3])
    assert [files.get(key) is not None for key in keys[:4]] == [True, False, True, True]
    for i in (4, 5):
        files.put(keys[i], rows[i])
        assert files.num_bytes() <= limit
        assert files.get(keys[i]) is not None
    assert not DocumentKvStore(tmp_path / "small", 10).put(keys[0], rows[0])


def test_rows_stay_readable_when_their_file_goes(tmp_path: Path) -> None:
    files, rows = DocumentKvStore(tmp_path, MIB), rows_of()
    files.put(key_of(rows), rows)
    found = files.get(key_of(rows))
    assert files.forget([text_hash("a text")]) == 1 and not list(tmp_path.iterdir())
    assert_same(found, rows)


def test_whoever_writes_to_rows_changes_no_file(tmp_path: Path) -> None:
    files, rows = DocumentKvStore(tmp_path, MIB), rows_of()
    files.put(key_of(rows), rows)
    found = files.get(key_of(rows))
    assert found is not None
    np.asarray(found.keys)[...] = 0
    assert_same(DocumentKvStore(tmp_path, MIB).get(key_of(rows)), rows)


def test_what_a_killed_process_left_half_written_is_not_read_and_goes_in_time(tmp_path: Path) -> None:
    files, rows = DocumentKvStore(tmp_path, MIB), rows_of()
    key = key_of(rows)
    half = tmp_path / f".1-1-{key.file}.part"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    assert files.get(key) is None and not files.groups()
    files.put(key, rows)
    assert [file.name for file in tmp_path.iterdir()] == [key.file]


def test_a_crash_before_the_rename_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, rows = DocumentKvStore(tmp_path, MIB), rows_of()

    def crash(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    assert not files.put(key_of(rows), rows)
    assert files.get(key_of(rows)) is None and not list(tmp_path.iterdir())


def test_many_at_once_read_whole_files_or_none(tmp_path: Path) -> None:
    rows = [rows_of((i, 2, 3), seed=i) for i in range(8)]
    keys = [key_of(row, str(i)) for i, row in enumerate(rows)]

    def work(turn: int) -> None:
        files = DocumentKvStore(tmp_path, 2500)  # as a process of its own; there is room for a few
        i = turn % len(rows)
        files.put(keys[i], rows[i])
        for key, row in zip(keys, rows, strict=True):
            if (found := files.get(key)) is not None:
                assert_same(found, row)
        if turn % 5 == 0:
            files.forget([keys[i].text])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64)))


def test_only_the_texts_that_are_there_are_retained(tmp_path: Path) -> None:
    files = DocumentKvStore(tmp_path, MIB)
    for text in ("one", "two"):
        files.put(key_of(rows_of(), text), rows_of())
    assert files.retain(lambda: {text_hash("two")}) == 1
    assert files.get(key_of(rows_of(), "one")) is None and files.get(key_of(rows_of(), "two")) is not None


def remove(store: DocumentStore) -> None:
    store.remove("notes.md")


def replaced(store: DocumentStore) -> None:
    store.add_text("notes.md", "Something else.", zone="device")


def made_a_copy(store: DocumentStore) -> None:
    store.add_text("notes.md", "The other text.", zone="device")


@pytest.mark.parametrize("change", [remove, replaced, made_a_copy])
def test_a_documents_kv_goes_with_it_and_that_of_others_stays(
    tmp_path: Path, change: Callable[[DocumentStore], None]
) -> None:
    with DocumentStore.open(tmp_path, load_embedder("hash")) as store:
        store.add_text("notes.md", "The key lies under the stone.", zone="device")
        store.add_text("other.md", "The other text.", zone="device")
        files = DocumentKvStore(tmp_path / FOLDER, MIB)
        keys = [key_of(rows_of(), passage.titled) for passage in store.passages(0, 10)]
        for key in keys:
            files.put(key, rows_of())
        change(store)
        assert [files.get(key) is not None for key in keys] == [False, True]


def test_a_store_tells_its_passages_in_pages_and_when_they_change(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path, load_embedder("hash")) as store:
        before = store.generation()
        for i in range(5):
            store.add_text(f"{i}.md", f"Text {i}.", zone="device")
        assert store.generation() != before
        found = [*(page := store.passages(0, 3)), *store.passages(page[-1].chunk_id, 3)]
        assert [passage.text.strip() for passage in found] == [f"Text {i}." for i in range(5)]
        assert store.holds(found[0].chunk_id)
        store.remove("0.md")
        assert not store.holds(found[0].chunk_id)
