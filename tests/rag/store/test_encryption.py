"""Encrypted stores: nothing readable on the disk, what is read is what was written, and damage is told."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline import sealing
from paceline.errors import ConfigError
from paceline.rag.document_kv import FOLDER as KV
from paceline.rag.document_kv import DocumentKvStore
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.library import Library
from paceline.sealing import DamagedError, StoreKey, StoreSeal
from tests.rag.store.killed import STEPS
from tests.rag.store.sealed import CELLAR, MARKS, MIB, NOTE, OWNER, content, filled, holding, kv_key

Made = tuple[Path, str, str]  # folder, ids of a file and of a vector store


def opened(folder: Path) -> DocumentStore:
    return DocumentStore.open(folder, HashEmbedder(), side="device")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Made]:
    """One plain store and one encrypted one, of the same content; never changed."""
    made = {}
    base = tmp_path_factory.mktemp("samples")
    source = base / "source"
    source.mkdir()
    for encrypt in (False, True):
        folder = base / str(encrypt) / "docs"
        made[encrypt] = (folder, *filled(folder, source, encrypt=encrypt))
    return made


@pytest.fixture
def copied(samples: dict[bool, Made], tmp_path: Path) -> Callable[[bool], Made]:
    def copy(encrypted: bool) -> Made:
        folder, file, made = samples[encrypted]
        shutil.copytree(folder.parent, tmp_path / "state", dirs_exist_ok=True)
        return tmp_path / "state" / "docs", file, made

    return copy


def test_no_file_of_an_encrypted_store_holds_what_a_plain_one_does(copied: Callable[[bool], Made]) -> None:
    assert {mark for _, mark in holding(copied(False)[0])} == set(MARKS)
    shutil.rmtree(copied(False)[0].parent)
    folder, file, made = copied(True)
    assert holding(folder.parent) == set()
    said = json.dumps(content(folder, file, made), default=str)
    assert NOTE in said and CELLAR in said and "winebook" in said and "merlot" in said
    assert holding(folder.parent) == set()


def test_encrypting_a_plain_store_keeps_all_it_says_and_leaves_no_plain_text(copied: Callable[[bool], Made]) -> None:
    folder, file, made = copied(False)
    before = content(folder, file, made)
    with opened(folder) as store:
        store.encrypt()
        assert store.seal.is_on
    assert holding(folder.parent) == set()
    after = content(folder, file, made)
    assert before[2] != [None, None] and after[2] == [None, None], "stored KV is computed again"
    assert [*before[:2], *before[3:]] == [*after[:2], *after[3:]]
    assert holding(folder.parent) == set()
    with opened(folder) as store:
        (document,) = store.documents()
        assert document.sha256[:24] not in document.id
        assert store.remove(document.name) == 1


@pytest.mark.parametrize("step", [1, 12, 55])
def test_a_kill_while_a_store_is_encrypted_loses_nothing(copied: Callable[[bool], Made], step: int) -> None:
    folder, file, made = copied(False)
    before = content(folder, file, made)
    code = """
store = DocumentStore.open(Path(sys.argv[1]), HashEmbedder())
store._database._connection.set_trace_callback(step)
unlink = Path.unlink
Path.unlink = lambda *a, **k: (step(), unlink(*a, **k))[1]
store.encrypt()
"""
    done = subprocess.run([sys.executable, "-c", STEPS + code, str(folder), str(step)], timeout=60, capture_output=True)
    assert done.returncode in (-signal.SIGKILL, 0), done.stderr
    after = content(folder, file, made)
    assert [*before[:2], *before[3:]] == [*after[:2], *after[3:]]
    with opened(folder) as store:
        if not store.seal.is_on:
            store.encrypt()
    assert content(folder, file, made)[1] == before[1]
    assert holding(folder.parent) == set()


def test_removing_a_document_removes_its_key(copied: Callable[[bool], Made]) -> None:
    folder, file, _ = copied(True)

    def keys() -> list[bytes]:
        with closing(sqlite3.connect(folder / "documents.sqlite")) as rows:
            union = "SELECT key FROM documents UNION SELECT key FROM files"
            return [key for (key,) in rows.execute(union) if key]

    def on_disk(key: bytes) -> bool:
        return any(key in path.read_bytes() for path in folder.rglob("*") if path.is_file())

    before = keys()
    assert len(before) == 4 and all(map(on_disk, before))
    with opened(folder) as store:
        assert store.remove("vault-notes.md") == 1
        library = Library(store, "device")
        library.delete_file(OWNER, file)
        library.close()
    gone = set(before) - set(keys())
    assert len(gone) == 3 and not any(map(on_disk, gone))
    assert [path.name for path in (folder / KV).iterdir()] == []


def test_no_key_of_what_is_removed_stays_in_memory_whichever_connection_removes_it(
    copied: Callable[[bool], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, _ = copied(True)
    with opened(folder) as store:
        seal, library = store.seal, Library(store, "device")
        assert isinstance(seal, StoreSeal)
        unwrap = sealing.SealedBox.open

        def removed_behind(box: sealing.SealedBox, sealed: bytes, place: str) -> bytes:
            found = unwrap(box, sealed, place)
            monkeypatch.undo()
            removing = threading.Thread(target=library.delete_file, args=[OWNER, file])
            removing.start()
            removing.join()
            return found

        with closing(library):
            library.uploads.get(OWNER, file)
            assert library.readable(OWNER).whole() and seal._boxes
            seal.forget()
            kv = DocumentKvStore(folder / KV, MIB, seal=seal)
            (cellar,) = [each for each in store.passages(0, 100) if each.collection != "default"]
            seal.forget()
            monkeypatch.setattr(sealing.SealedBox, "open", removed_behind)
            kv.get(kv_key(kv, cellar))
            assert not seal._boxes, "of a file that was being read when it was removed"
            store.passages(0, 100)
            assert seal._boxes
            with opened(folder) as another:
                assert another.remove("vault-notes.md") == 1
            store.removals()  # as a node asks every few seconds
            assert not seal._boxes


def test_without_its_key_a_store_is_refused_and_stays_as_it_is(copied: Callable[[bool], Made]) -> None:
    folder, file, made = copied(True)
    key = StoreKey(folder).path
    kept, before = key.read_bytes(), content(folder, file, made)
    key.unlink()
    with pytest.raises(ConfigError, match=r"encrypted, and .*docs\.key, which held their key, is gone"):
        opened(folder)
    with pytest.raises(ConfigError, match="is gone"):
        DocumentStore.open(folder, HashEmbedder(), encrypt=True)
    assert not key.exists(), "no other key is made in its place"
    key.write_bytes(kept.replace(kept[30:34], b"AAAA"))
    key.chmod(0o600)
    with pytest.raises(ConfigError, match=r"encrypted with another key than that of .*docs\.key"):
        opened(folder)
    for damage in (b"{", b"", b"[]", b'"keyring"', b'{"key": 5}', b'{"key": "QUJD"}', b"\xff", b"[" * 100_000):
        key.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"docs\.key is damaged: put back a copy"):
            opened(folder)
    key.write_bytes(kept)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        opened(folder)
    key.chmod(0o600)
    assert content(folder, file, made) == before


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_store_whose_seal_is_recorded_no_more_is_refused_and_stays_as_it_is(
    copied: Callable[[bool], Made], encrypt: bool
) -> None:
    """Taken for a plain one, it would be read as it lies there, and encrypted once more."""
    folder, file, made = copied(True)
    before = content(folder, file, made)
    with closing(sqlite3.connect(folder / "documents.sqlite")) as rows:
        (seal,) = rows.execute("SELECT value FROM meta WHERE key = 'seal'").fetchone()
        rows.execute("DELETE FROM meta WHERE key = 'seal'")
        rows.commit()
        with pytest.raises(ConfigError, match=r"the record of their key in documents\.sqlite is gone: put back a copy"):
            DocumentStore.open(folder, HashEmbedder(), side="device", encrypt=encrypt)
        rows.execute("INSERT INTO meta VALUES ('seal', ?)", (seal,))
        rows.commit()
    assert content(folder, file, made) == before


def test_a_damaged_document_is_named_and_takes_no_other_with_it(
    copied: Callable[[bool], Made], caplog: pytest.LogCaptureFixture
) -> None:
    folder, file, made = copied(True)
    with opened(folder) as store:
        store.add_text("other.txt", "Another text about the vault, unharmed.", zone="device")
        (harmed,) = [document.id for document in store.documents() if document.name == "vault-notes.md"]
    with closing(sqlite3.connect(folder / "documents.sqlite")) as rows:
        (text,) = rows.execute("SELECT text FROM chunks WHERE document = ?", (harmed,)).fetchone()
        flipped = bytes([*text[:-1], text[-1] ^ 1])
        rows.execute("UPDATE chunks SET text = ? WHERE document = ?", (flipped, harmed))
        rows.commit()
    with caplog.at_level(logging.ERROR), opened(folder) as store:
        assert [passage.document for passage in store.search("text about the vault", 4)] == ["other.txt"]
        assert f"the document {harmed} is damaged on the disk" in caplog.text
        assert len(store.documents()) == 2
        with pytest.raises(DamagedError):
            store.reindex()
        assert store.remove("vault-notes.md") == 1
        assert store.reindex() == 2
    said = json.dumps(content(folder, file, made), default=str)
    assert "unharmed" in said and CELLAR in said


@pytest.mark.parametrize("column", ["text", "embedding", "title"])
def test_values_of_two_documents_cannot_be_exchanged(copied: Callable[[bool], Made], column: str) -> None:
    folder, _, _ = copied(True)
    with opened(folder) as store:
        store.add_text("other.txt", "Another text about the vault, unharmed.", zone="device")
        before = {passage.text for passage in store.passages(0, 10)}
    with closing(sqlite3.connect(folder / "documents.sqlite")) as rows:
        (first, a), (second, b) = rows.execute(f"SELECT id, {column} FROM chunks LIMIT 2").fetchall()
        rows.executemany(f"UPDATE chunks SET {column} = ? WHERE id = ?", [(b, first), (a, second)])
        rows.commit()
    with opened(folder) as store:
        index = store._index
        found = store.search("the word that opens the quixotic vault", 10, min_score=-1.0)
        assert {passage.text for passage in found} < before
        assert column != "embedding" or not {first, second} & {*index._vector_index.ids.tolist()}


def test_a_program_that_had_the_plain_store_open_is_told_to_start_again(copied: Callable[[bool], Made]) -> None:
    folder, _, _ = copied(False)
    with opened(folder) as before, opened(folder) as store:
        store.encrypt()
        with pytest.raises(ConfigError, match="encrypted by another program meanwhile: start this one again"):
            before.documents()
        with pytest.raises(ConfigError, match="meanwhile"):
            before.add_text("new.txt", "The new text.", zone="device")
    assert holding(folder.parent) == set()


def test_stored_kv_is_bound_to_its_file_and_its_key_is_overwritten(copied: Callable[[bool], Made]) -> None:
    folder, _, _ = copied(True)
    with opened(folder) as store:
        files = DocumentKvStore(folder / KV, MIB, seal=store.seal)
        first, second = (kv_key(files, passage) for passage in store.passages(0, 2))
        paths = [files._path(key) for key in (first, second)]
        assert files.get(first) is not None
        paths[0].write_bytes(paths[1].read_bytes())
        assert files.get(first) is None and not paths[0].exists(), "another file's content is damage"
        with paths[1].open("rb") as open_before:
            assert files.forget([second.text]) == 1
            assert open_before.read()[:60] == bytes(60)


class FakeKeyring:
    """A keyring of the operating system."""

    priority = 5.0

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], str] = {}
        self.is_locked = False

    def get_password(self, service: str, username: str) -> str | None:
        if self.is_locked:
            raise RuntimeError("the collection is locked")
        return self.kept.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        if self.is_locked:
            raise RuntimeError("the collection is locked")
        self.kept[service, username] = password


@pytest.fixture
def keyring(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKeyring]:
    ring = FakeKeyring()
    monkeypatch.setattr(sealing, "system_keyring", lambda: ring)
    yield ring


def test_the_key_lies_in_the_keyring_where_there_is_one(
    tmp_path: Path, keyring: FakeKeyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = StoreKey(tmp_path / "docs")
    key = where.read_or_make()
    assert where.read() == key == where.read_or_make() and len(keyring.kept) == 1
    assert next(iter(keyring.kept.values())) not in where.path.read_text()
    keyring.is_locked = True
    with pytest.raises(ConfigError, match=r"cannot be opened .*locked.*: unlock it"):
        where.read_or_make()
    keyring.is_locked = False
    monkeypatch.setattr(sealing, "system_keyring", lambda: None)
    with pytest.raises(ConfigError, match=r"there is none here: start in the session of its user, with .*\[keyring\]"):
        where.read_or_make()
    monkeypatch.setattr(sealing, "system_keyring", lambda: keyring)
    keyring.kept.clear()
    with pytest.raises(ConfigError, match="no longer has the key"):
        where.read_or_make()


def test_a_keyring_that_refuses_leaves_the_key_in_a_private_file(tmp_path: Path, keyring: FakeKeyring) -> None:
    keyring.is_locked = True
    where = StoreKey(tmp_path / "docs")
    where.read_or_make()
    keyring.is_locked = False
    assert len(where.read() or b"") == 32 and not keyring.kept
    assert where.path.stat().st_mode & 0o777 == 0o600


def test_makeshift_keyrings_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        ring = FakeKeyring()

        @classmethod
        def get_keyring(cls) -> FakeKeyring:
            return cls.ring

    monkeypatch.setitem(sys.modules, "keyring", Library)
    assert sealing.system_keyring() is Library.ring
    Library.ring.priority = 0.5
    assert sealing.system_keyring() is None
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert sealing.system_keyring() is None


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_file_that_is_cut_off_or_whose_pieces_are_exchanged_is_damaged(num_bytes: int) -> None:
    _, box = StoreSeal.new(bytes(32)).make_key("file-1")
    plain = os.urandom(num_bytes)
    pieces = list(box.seal_file(io.BytesIO(plain)))
    assert b"".join(box.open_file(io.BytesIO(b"".join(pieces)))) == plain
    wrong = [pieces[:-1], [*pieces, pieces[-1]], [*pieces[:-1], pieces[-1][:-1]]]
    if len(pieces) > 2:
        wrong.append([pieces[1], pieces[0], *pieces[2:]])
    for each in wrong:
        with pytest.raises(DamagedError):
            list(box.open_file(io.BytesIO(b"".join(each))))
