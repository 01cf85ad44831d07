"""Folders: what is found by a name, and changes in them."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue

import pytest

from paceline.rag.folders import changes, matching
from paceline.rag.records import Document


def document(name: str, source: str) -> Document:
    return Document(f"doc-{name}", name, "0" * 64, "device", 0.0, 1, source)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Document]:
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    return [
        document("a.md", f"{here}/notes/a.md"),
        document("sub/b.md", f"{here}/notes/sub/b.md"),
        document("notes.txt", f"{here}/notes.txt"),
        document("said.txt", ""),
        document("[1].txt", f"{here}/other/[1].txt"),
    ]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("a.md", ["a.md"]),
        ("doc-a.md", ["a.md"]),
        ("[1].txt", ["[1].txt"]),  # its name, though it reads like a pattern
        ("*.txt", ["notes.txt", "said.txt", "[1].txt"]),
        ("note*", ["notes.txt"]),  # and not the folder notes
        ("notes/*", ["a.md"]),
        ("*/b.*", ["sub/b.md"]),
        ("notes", ["a.md", "sub/b.md"]),
        ("./notes/sub/", ["sub/b.md"]),
        ("sub", ["sub/b.md"]),
        ("other/../notes.txt", ["notes.txt"]),
        ("note", []),
        ("a\0b", []),
        ("", []),
    ],
)
def test_what_is_named_is_found_and_nothing_else(known: list[Document], wanted: str, names: list[str]) -> None:
    assert [found.name for found in matching(known, wanted)] == names


# ---- waiting for changes of files, on the real file system ----------------------------------------------------------
def test_changes_are_told_from_the_first_turn_on_until_it_is_stopped(tmp_path: Path) -> None:
    turns: Queue[int] = Queue()
    stop = threading.Event()

    def watch() -> None:
        for number, _ in enumerate(changes([tmp_path], stop)):
            turns.put(number)
        turns.put(-1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert turns.get(timeout=60) == 0, "before anything has changed"
    (tmp_path / ".hidden.md").write_text("not read")
    (tmp_path / "documents.sqlite-wal").write_bytes(b"of a store that lies here")
    (tmp_path / "a.md").write_text("Something.")
    assert turns.get(timeout=60) == 1
    (tmp_path / "a.md").unlink()
    assert turns.get(timeout=60) == 2
    stop.set()
    assert turns.get(timeout=60) == -1
    thread.join(60)
