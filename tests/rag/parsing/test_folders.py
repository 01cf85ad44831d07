"""Files in folders: found, read from there, looked for by a name, and their changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import Queue

import pytest

from paceline.errors import DocumentError
from paceline.rag.folders import changes, matching
from paceline.rag.parsing.folders import FoundFile, find_files, read_files
from paceline.rag.parsing.process import Parsed, ParserPool
from paceline.rag.records import Document


@pytest.fixture(scope="module")
def parsers() -> Iterator[ParserPool]:
    with closing(ParserPool()) as pool:
        yield pool


def test_a_missing_huge_or_special_file_is_refused_without_reading_it_whole(
    tmp_path: Path, parsers: ParserPool
) -> None:
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: a terabyte that fits no memory
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    paths = {huge: "larger than 64 MiB", pipe: "not a regular file", tmp_path / "no.txt": "No such"}
    files = [FoundFile(path, path.name) for path in paths]
    for (file, error), reason in zip(read_files(files, parsers), paths.values(), strict=True):
        assert isinstance(error, DocumentError), file
        assert reason in str(error)


def test_a_file_that_becomes_a_link_after_it_was_found_is_not_read(tmp_path: Path, parsers: ParserPool) -> None:
    root, outside = tmp_path / "notes", tmp_path / "outside"
    for folder in (root / "deep", outside):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("a secret" if folder == outside else "words")
    (root / "b.txt").write_text("words")
    (root / "c.txt").write_text("words")
    files, _ = find_files([root])
    (root / "b.txt").unlink()
    (root / "b.txt").symlink_to(outside / "a.txt")
    (root / "c.txt").unlink()
    os.link(outside / "a.txt", root / "c.txt")
    (root / "deep").rename(tmp_path / "gone")
    (root / "deep").symlink_to(outside)
    read = {file.name: result for file, result in read_files(files, parsers)}
    assert set(read) == {"b.txt", "c.txt", "deep/a.txt"}
    for result in read.values():
        assert isinstance(result, DocumentError) and "was exchanged" in str(result)


def test_a_root_that_becomes_a_link_to_elsewhere_is_not_read(tmp_path: Path, parsers: ParserPool) -> None:
    for folder in ("notes", "outside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    files, _ = find_files([tmp_path / "notes"])
    (tmp_path / "notes").rename(tmp_path / "gone")
    (tmp_path / "notes").symlink_to(tmp_path / "outside")
    ((_, result),) = read_files(files, parsers)
    assert isinstance(result, DocumentError) and "was exchanged" in str(result)


def test_an_empty_file_is_no_document(tmp_path: Path, parsers: ParserPool) -> None:
    (tmp_path / "empty.txt").write_text("")
    for named in (tmp_path, tmp_path / "empty.txt"):
        ((_, error),) = read_files(find_files([named])[0], parsers)
        assert isinstance(error, DocumentError) and error.empty and "is empty" in str(error)


def test_folders_are_walked_and_skipped_entries_are_reported(tmp_path: Path) -> None:
    root, outside = tmp_path / "notes", tmp_path / "secret.txt"
    (root / "deep" / "er").mkdir(parents=True)
    (root / ".git").mkdir()
    for path in ("b.md", "deep/er/a.TXT", "deep/c.markdown", ".hidden.md", ".git/x.md", "picture.png"):
        (root / path).write_text("words")
    outside.write_text("secret")
    (root / "out.txt").symlink_to(outside)
    (root / "in.txt").symlink_to(root / "b.md")
    (root / "loop").symlink_to(root)
    files, skipped = find_files([root])
    assert [file.name for file in files] == ["b.md", "deep/c.markdown", "deep/er/a.TXT"]
    reasons = {item.name: item.note for item in skipped}
    assert set(reasons) == {".git", ".hidden.md", "picture.png", "out.txt", "in.txt", "loop"}
    assert "out of the folder" in reasons["out.txt"]
    assert "own name" in reasons["in.txt"]


def test_a_named_file_may_lie_anywhere_and_keeps_its_own_name_only(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "notes.md").write_text("words")
    files, _ = find_files([tmp_path / "x" / ".." / "notes.md"])
    assert [file.name for file in files] == ["notes.md"]


def test_a_file_name_that_is_not_utf_8_becomes_readable(tmp_path: Path, parsers: ParserPool) -> None:
    with open(os.fsencode(tmp_path) + b"/gr\xfc\xdfe.txt", "wb") as stream:
        stream.write(b"words")
    files, _ = find_files([tmp_path])
    ((_, parsed),) = read_files(files, parsers)
    assert isinstance(parsed, Parsed)
    assert parsed.name == "gr\ufffd\ufffde.txt"


# ---- what is found by a name ----------------------------------------------------------------------------------------
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


def test_the_working_directory_is_no_pattern_and_a_name_may_be_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Project [2026]"
    odd = os.fsdecode(b"b\xfed.md")
    (folder / "notes").mkdir(parents=True)
    monkeypatch.chdir(folder)
    where = os.path.realpath(folder)
    known = [
        Document(f"doc-{n}", name, "", "device", 0.0, 1, f"{where}/notes/{name}")
        for n, name in enumerate(["n1.md", "b\ufffdd.md"])
    ]
    for wanted, found in [
        ("notes/n1*", "n1.md"),
        ("./notes/n*", "n1.md"),
        (f"notes/{odd}", "b\ufffdd.md"),
        (odd, "b\ufffdd.md"),
    ]:
        assert [each.name for each in matching(known, wanted)] == [found], wanted


# ---- waiting for changes of files, on the real file system ----------------------------------------------------------
@contextmanager
def watched(folder: Path) -> Iterator[Queue[int]]:
    """Turns, as they come, after the first; -1 when it has ended."""
    turns: Queue[int] = Queue()
    stop = threading.Event()

    def watch() -> None:
        for number, _ in enumerate(changes([folder], stop)):
            turns.put(number)
        turns.put(-1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert turns.get(timeout=60) == 0, "before anything has changed"
    yield turns
    stop.set()
    while turns.get(timeout=60) != -1:
        pass
    thread.join(60)


def test_changes_are_told_from_the_first_turn_on_until_it_is_stopped(tmp_path: Path) -> None:
    with watched(tmp_path) as turns:
        (tmp_path / ".hidden.md").write_text("not read")
        (tmp_path / "documents.sqlite-wal").write_bytes(b"of a store that lies here")
        (tmp_path / "a.md").write_text("Something.")
        assert turns.get(timeout=60) == 1
        (tmp_path / "a.md").unlink()
        assert turns.get(timeout=60) == 2


def test_a_folder_with_a_dot_in_its_name_is_noticed_as_it_comes_and_goes(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "Bills 2026.11"
    here.mkdir()
    there.mkdir()
    (there / "a.md").write_text("Something.")
    with watched(here) as turns:
        there.rename(here / there.name)
        assert turns.get(timeout=60) == 1
        (here / there.name).rename(there)
        assert turns.get(timeout=60) == 2


@pytest.mark.parametrize("way", ["replaced", "made anew"])
def test_a_folder_that_takes_the_place_of_the_watched_one_is_watched(tmp_path: Path, way: str) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    with watched(here) as turns:
        if way == "replaced":
            here.rename(tmp_path / "before")
            other.rename(here)
        else:
            here.rmdir()
            here.mkdir()
        for number in range(3):  # a turn may be of the folder itself
            (here / f"{number}.md").write_text("Something.")
            turns.get(timeout=60)
