"""Stamps of files: what has the same size, inode and times as when it was read is not read again."""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.rag.embedder import HashEmbedder
from paceline.rag.folders import sync_folders
from paceline.rag.parsing import folders
from paceline.rag.parsing.folders import FoundFile, stamp_of
from paceline.rag.store import documents as documents_module
from paceline.rag.store.documents import DocumentStore

BOAT = "The red boat belongs to Ann Bell.\n"
TRAIN = "The night train to Lisbon leaves at nine.\n"


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "boat.txt").write_text(BOAT)
    (folder / "train.txt").write_text(TRAIN)
    return folder


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DocumentStore]:
    with DocumentStore.open(tmp_path / "store", HashEmbedder(), side="device", encrypt=request.param) as opened:
        yield opened


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read, from the fixture's use on; files of this moment have stamps."""
    names: list[str] = []
    read_files = documents_module.read_files

    def counted(files: list[FoundFile], parsers: object) -> object:
        names.extend(file.name for file in files)
        return read_files(files, parsers)  # type: ignore[arg-type]  # passed on unchanged

    monkeypatch.setattr(folders, "_FRESH_NS", 0)
    monkeypatch.setattr(documents_module, "read_files", counted)
    return names


def statuses(store: DocumentStore, notes: Path, **options: bool) -> dict[str, str]:
    return {each.name: each.status for each in sync_folders(store, [notes], zone="device", **options)}


def test_what_has_not_changed_is_not_read_again(store: DocumentStore, notes: Path, read: list[str]) -> None:
    assert statuses(store, notes) == {"boat.txt": "added", "train.txt": "added"}
    read.clear()
    assert statuses(store, notes) == {"boat.txt": "unchanged", "train.txt": "unchanged"}
    assert read == []
    (notes / "train.txt").write_text(TRAIN.replace("nine", "ten "))
    assert statuses(store, notes) == {"boat.txt": "unchanged", "train.txt": "replaced"}
    assert read == ["train.txt"]
    assert statuses(store, notes, read_all=True) == {"boat.txt": "unchanged", "train.txt": "unchanged"}
    assert read == ["train.txt", "boat.txt", "train.txt"]


@pytest.mark.parametrize("seed", range(3))
def test_one_sync_makes_the_documents_those_of_the_files(
    store: DocumentStore, notes: Path, read: list[str], seed: int
) -> None:
    """Whatever becomes of them: texts are swapped, kept under another name, emptied; files become links and folders."""
    del read  # files of this moment have stamps
    rng, texts = random.Random(seed), [BOAT, TRAIN, "The key is under the broom.\n", "The tide is at six.\n"]
    odd = os.fsdecode(b"bad\xfename.txt")
    for _ in range(8):
        for name in rng.sample(["boat.txt", "policy-2024.txt", "policy.txt", "train.txt", odd], 3):
            path, becomes = notes / name, rng.choice(["text", "text", "text", "blank", "gone", "link", "folder", "old"])
            if becomes == "old" and path.is_file() and not path.is_symlink():
                (notes / "an-older.txt").write_text(path.read_text())
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            path.unlink(missing_ok=True)
            if becomes in ("text", "old"):
                path.write_text(rng.choice(texts))
            elif becomes == "blank":
                path.write_text(rng.choice(["", " \n"]))
            elif becomes == "link":
                path.symlink_to(notes / "stays.txt")
            elif becomes == "folder":
                path.mkdir()
        (notes / "stays.txt").write_text("This stays.\n")
        statuses(store, notes)
        stored = sorted(passage.text.strip() for passage in store.passages(0, 99))
        regular = [each for each in notes.iterdir() if each.is_file() and not each.is_symlink()]
        assert stored == sorted({text for each in regular if (text := each.read_text().strip())})


def test_a_file_that_was_only_touched_is_read_once_more(store: DocumentStore, notes: Path, read: list[str]) -> None:
    statuses(store, notes)
    read.clear()
    os.utime(notes / "boat.txt", ns=(1, 1))
    for _ in range(2):
        assert set(statuses(store, notes).values()) == {"unchanged"}
    assert read == ["boat.txt"]


def test_a_change_that_keeps_size_and_time_of_the_content_is_noticed(
    store: DocumentStore, notes: Path, read: list[str]
) -> None:
    os.utime(notes / "boat.txt", ns=(1, 1))
    statuses(store, notes)
    read.clear()
    (notes / "boat.txt").write_text(BOAT.replace("red", "old"))
    os.utime(notes / "boat.txt", ns=(1, 1))
    assert statuses(store, notes)["boat.txt"] == "replaced"


def test_a_moved_file_and_a_copy_are_read_and_the_copy_takes_over_what_is_gone(
    store: DocumentStore, notes: Path, read: list[str]
) -> None:
    (notes / "zzz.txt").write_text(BOAT)
    assert statuses(store, notes) == {"boat.txt": "added", "train.txt": "added", "zzz.txt": "duplicate"}
    (notes / "train.txt").rename(notes / "coach.txt")
    (notes / "boat.txt").unlink()
    read.clear()
    assert statuses(store, notes) == {"coach.txt": "moved", "zzz.txt": "moved"}
    assert {document.name for document in store.documents()} == {"coach.txt", "zzz.txt"}
    read.clear()
    assert set(statuses(store, notes).values()) == {"unchanged"} and read == []


def test_a_file_of_this_moment_has_no_stamp_since_its_next_change_may_have_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    status = (tmp_path / "a.txt").stat()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    assert stamp_of(status, changed + folders._FRESH_NS - 1) == ""
    assert stamp_of(status, changed + folders._FRESH_NS) != ""
    assert stamp_of(tmp_path.stat(), 2 * changed) == "", "a folder is no file"


def test_a_sealed_store_keeps_no_stamp_in_plain_text(tmp_path: Path, notes: Path, read: list[str]) -> None:
    with DocumentStore.open(tmp_path / "store", HashEmbedder(), side="device") as store:
        statuses(store, notes)
        store.encrypt()
        read.clear()
        assert set(statuses(store, notes).values()) == {"unchanged"} and read == []
    (inode, *_) = (str(file.stat().st_ino) for file in notes.iterdir())
    with closing(sqlite3.connect(tmp_path / "store" / "documents.sqlite")) as rows:
        stamps = [stamp for (stamp,) in rows.execute("SELECT stamp FROM documents")]
    assert len(stamps) == 2 and not any(inode in stamp or " " in stamp for stamp in stamps)
