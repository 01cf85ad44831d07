"""Document KV on disk: exact, shared and bounded; damaged files and those of another text count as missing."""

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

from paceline.core.batching.block_manager import CARRIERS, KvArray, KvPrefix
from paceline.rag import document_kv
from paceline.rag.document_kv import FOLDER, DocumentKvStore, KvKey, text_hash
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore

MIB = 1 << 20


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> KvArray:
    size = (*shape[:-1], shape[-1] * CARRIERS[dtype].itemsize)
    return np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8).view(CARRIERS[dtype])


def prefix_of(tokens: tuple[int, ...] = (3, 1, 4), dtype: str = "float32", seed: int = 0) -> KvPrefix:
    keys, values = (random_array((2, len(tokens), 2, dim), dtype, seed + dim) for dim in (4, 5))
    return KvPrefix("fingerprint", dtype, tokens, keys, values)


def key_of(prefix: KvPrefix, text: str = "a text", model: str = "model") -> KvKey:
    return KvKey(text_hash(text), model, prefix.tokens)


def assert_same(found: KvPrefix | None, expected: KvPrefix) -> None:
    assert found is not None
    assert (found.model, found.dtype, found.tokens) == (expected.model, expected.dtype, expected.tokens)
    for a, b in ((found.keys, expected.keys), (found.values, expected.values)):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Ticking:
    """Time that advances by a second at each call."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def time_ns(self) -> int:
        self.now += 1
        return self.now * 10**9

    def time(self) -> float:
        return self.time_ns() / 1e9


@pytest.mark.parametrize("dtype", CARRIERS)
def test_kv_is_read_back_bit_for_bit_by_another_store(tmp_path: Path, dtype: str) -> None:
    prefix = prefix_of(dtype=dtype)
    assert DocumentKvStore(tmp_path, MIB).put(key_of(prefix), prefix)
    assert_same(DocumentKvStore(tmp_path, MIB).get(key_of(prefix)), prefix)


def test_files_are_safetensors_readable_by_their_owner_only(tmp_path: Path) -> None:
    prefix = prefix_of(dtype="bfloat16")
    DocumentKvStore(tmp_path / FOLDER, MIB).put(key_of(prefix), prefix)
    (file,) = (tmp_path / FOLDER).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with safe_open(file, framework="np") as stored:
        assert sorted(stored.keys()) == ["keys", "tokens", "values"]
        assert stored.get_tensor("tokens").tolist() == [3, 1, 4]


def test_kv_of_another_text_model_or_prefix_is_never_returned(tmp_path: Path) -> None:
    files, prefix = DocumentKvStore(tmp_path, MIB), prefix_of()
    key = key_of(prefix)
    files.put(key, prefix)
    for other in (replace(key, text=text_hash("b")), replace(key, model="m"), replace(key, tokens=(3, 1, 5))):
        assert files.get(other) is None
        os.link(tmp_path / key.file, tmp_path / other.file)  # even under the other key's file name
        assert other.text != key.text or files.get(other) is None
    assert_same(files.get(key), prefix)


@settings(max_examples=40)
@given(where=st.floats(0, 1, exclude_max=True), cut=st.booleans(), flip=st.integers(1, 255))
def test_a_damaged_file_is_deleted_and_can_be_written_again(
    tmp_path_factory: pytest.TempPathFactory, where: float, cut: bool, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("kv")
    prefix = prefix_of()
    key = key_of(prefix)
    DocumentKvStore(folder, MIB).put(key, prefix)
    path = folder / key.file
    content = bytearray(path.read_bytes())
    offset = int(where * len(content))
    if cut:
        del content[offset:]
    else:
        content[offset] ^= flip
    path.write_bytes(content)
    files = DocumentKvStore(folder, MIB)
    found = files.get(key)
    if found is not None:  # a change of the header's padding is harmless
        assert_same(found, prefix)
        return
    assert not path.exists()
    assert files.put(key, prefix)
    assert_same(files.get(key), prefix)


def test_least_recently_used_files_are_evicted_and_the_limit_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_kv, "time", Ticking())
    prefixes = [prefix_of((i, 2, 3), seed=i) for i in range(6)]
    keys = [key_of(prefix, str(i)) for i, prefix in enumerate(prefixes)]
    probe = DocumentKvStore(tmp_path / "probe", MIB)
    probe.put(keys[0], prefixes[0])
    limit = 3 * probe.num_bytes()
    files = DocumentKvStore(tmp_path / "kv", limit)
    assert files.has_room(prefixes[0])
    for i in range(3):
        files.put(keys[i], prefixes[i])
        assert files.get(keys[i]) is not None
    assert files.get(keys[0]) is not None  # used again: now 1 is the least recently used
    assert not files.has_room(prefixes[3])
    files.put(keys[3], prefixes[3])
    assert [files.get(key) is not None for key in keys[:4]] == [True, False, True, True]
    for i in (4, 5):
        files.put(keys[i], prefixes[i])
        assert files.num_bytes() <= limit
        assert files.get(keys[i]) is not None
    assert not DocumentKvStore(tmp_path / "small", 10).put(keys[0], prefixes[0])


def test_half_written_files_of_a_killed_process_are_not_read_and_are_removed_later(tmp_path: Path) -> None:
    files, prefix = DocumentKvStore(tmp_path, MIB), prefix_of()
    key = key_of(prefix)
    half = tmp_path / f".1-1-{key.file}.part"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    assert files.get(key) is None and not files.groups()
    files.put(key, prefix)
    assert [file.name for file in tmp_path.iterdir()] == [key.file]


def test_concurrent_readers_see_whole_files_or_none(tmp_path: Path) -> None:
    prefixes = [prefix_of((i, 2, 3), seed=i) for i in range(8)]
    keys = [key_of(prefix, str(i)) for i, prefix in enumerate(prefixes)]

    def work(turn: int) -> None:
        files = DocumentKvStore(tmp_path, 2500)  # one per call, as in separate processes; it has room for a few
        i = turn % len(prefixes)
        files.put(keys[i], prefixes[i])
        for key, prefix in zip(keys, prefixes, strict=True):
            if (found := files.get(key)) is not None:
                assert_same(found, prefix)
        if turn % 5 == 0:
            files.forget([keys[i].text])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(64)))


def test_retain_removes_the_files_of_all_other_texts(tmp_path: Path) -> None:
    files = DocumentKvStore(tmp_path, MIB)
    for text in ("one", "two"):
        files.put(key_of(prefix_of(), text), prefix_of())
    assert files.retain(lambda: {text_hash("two")}) == 1
    assert files.get(key_of(prefix_of(), "one")) is None and files.get(key_of(prefix_of(), "two")) is not None


def removed(store: DocumentStore) -> None:
    store.remove("notes.md")


def replaced(store: DocumentStore) -> None:
    store.add_text("notes.md", "Something else.", zone="device")


def turned_into_a_copy(store: DocumentStore) -> None:
    store.add_text("notes.md", "The other text.", zone="device")


@pytest.mark.parametrize("change", [removed, replaced, turned_into_a_copy])
def test_removing_or_replacing_a_document_removes_its_kv_only(
    tmp_path: Path, change: Callable[[DocumentStore], None]
) -> None:
    with DocumentStore.open(tmp_path, load_embedder("hash")) as store:
        store.add_text("notes.md", "The key lies under the stone.", zone="device")
        store.add_text("other.md", "The other text.", zone="device")
        files = DocumentKvStore(tmp_path / FOLDER, MIB)
        keys = [key_of(prefix_of(), passage.titled) for passage in store.passages(0, 10)]
        for key in keys:
            files.put(key, prefix_of())
        change(store)
        assert [files.get(key) is not None for key in keys] == [False, True]


def test_a_store_lists_passages_in_pages_and_its_generation_changes_with_them(tmp_path: Path) -> None:
    with DocumentStore.open(tmp_path, load_embedder("hash")) as store:
        before = store.generation()
        for i in range(5):
            store.add_text(f"{i}.md", f"Text {i}.", zone="device")
        assert store.generation() != before
        found = [*(page := store.passages(0, 3)), *store.passages(page[-1].chunk_id, 3)]
        assert [passage.text.strip() for passage in found] == [f"Text {i}." for i in range(5)]
        assert store.chunks([found[0].chunk_id])
        store.remove("0.md")
        assert not store.chunks([found[0].chunk_id])


def test_kv_stays_readable_after_its_file_is_removed(tmp_path: Path) -> None:
    files, prefix = DocumentKvStore(tmp_path, MIB), prefix_of()
    files.put(key_of(prefix), prefix)
    found = files.get(key_of(prefix))
    assert files.forget([text_hash("a text")]) == 1 and not list(tmp_path.iterdir())
    assert_same(found, prefix)


def test_a_crash_before_the_rename_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, prefix = DocumentKvStore(tmp_path, MIB), prefix_of()

    def crash(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    assert not files.put(key_of(prefix), prefix)
    assert files.get(key_of(prefix)) is None and not list(tmp_path.iterdir())
