"""Parsing: titles, refusals, and finding files in folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.rag.parse import MAX_BYTES, MAX_TITLE, FoundFile, check_name, find_files, parse, read_file


def refusal(name: str, data: bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(name, data)
    return str(caught.value)


def test_a_byte_order_mark_and_other_line_ends_do_not_change_the_document() -> None:
    plain = parse("a.txt", b"One.\nTwo.\n")
    assert parse("a.txt", b"\xef\xbb\xbfOne.\r\nTwo.\r") == plain
    assert plain.text == "One.\nTwo.\n"


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("a.md", "# Harbour rules #\n\nNo swimming.", "Harbour rules"),
        ("a.md", "\n\n## Second level\ntext", "Second level"),
        ("a.markdown", "Harbour rules\n=====\n\ntext", "Harbour rules"),
        ("a.txt", "Harbour rules\n\nNo swimming.", "Harbour rules"),
        ("a.txt", "No swimming.\n\nNo diving.", ""),
        ("a.txt", "Only one line", ""),
        ("a.md", "###### Sixth ###   \ntext", "Sixth"),
        ("a.md", "# Sharp C#\ntext", "Sharp C#"),
        ("a.md", "# #\n\ntext", ""),
        ("a.md", "#\tTabbed\t##\ntext", "Tabbed"),
        ("a.md", "####### Seven are none\ntext", ""),
        ("a.md", "#hashtag\ntext", ""),
        ("a.md", "# " + "long " * 100, ("long " * 100)[:MAX_TITLE]),
        ("a.md", "Plain words first.\n\n# Later heading", ""),
        ("a.txt", "word " * 40 + "\n\nrest", ""),
    ],
)
def test_the_title_is_a_heading_or_a_short_separate_first_line(name: str, text: str, title: str) -> None:
    assert parse(name, text.encode()).title == title


@pytest.mark.parametrize(
    "hostile",
    [
        b"# x" + b" " * (MAX_BYTES - 10) + b"x",
        b"# " + b"x " * (MAX_BYTES // 2 - 10),
        b"# x" + b" #" * (MAX_BYTES // 2 - 10),
        b"#" * (MAX_BYTES - 10),
        b"x\n" + b"=" * (MAX_BYTES - 10) + b"x",
        b"x\n" + b"=" + b" " * (MAX_BYTES - 10) + b"x",
        b"x\n" + b"-" * 3 + b"\t " * (MAX_BYTES // 2 - 10) + b"x",
    ],
    ids=["blanks", "words", "marks", "hashes", "setext", "setext blanks", "setext tabs"],
)
def test_the_largest_hostile_first_lines_are_parsed_quickly(hostile: bytes) -> None:
    """A parser that backtracks, even once per character, exceeds the time limit of a test."""
    assert len(parse("notes.md", hostile).title) <= MAX_TITLE


def test_unreadable_content_is_refused_with_advice() -> None:
    assert "save it as UTF-8" in refusal("a.txt", "Grüße".encode("latin-1"))
    assert "save it as UTF-8" in refusal("a.txt", "text".encode("utf-16"))
    assert "convert it" in refusal("a.txt", b"PK\0\0\0")
    assert "is empty" in refusal("a.txt", b"")
    assert "is empty" in refusal("a.txt", b" \n\t\n")
    assert "split it" in refusal("a.txt", b"a" * (MAX_BYTES + 1))


@pytest.mark.parametrize(
    "name", ["", "../x", "a/../x", "/etc/x", "a//b", "./a", "a\0b", "a\nb", "a\x1b[2Jb", "..", "c:\\x", "x" * 256]
)
def test_a_name_that_could_mislead_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a document"):
        check_name(name)


def test_a_missing_huge_or_special_file_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    huge = tmp_path / "huge.txt"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: a terabyte that fits no memory
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    for path, reason in ((huge, "larger than 10 MiB"), (pipe, "not a regular file"), (tmp_path / "no.txt", "No such")):
        with pytest.raises(ConfigError, match=reason):
            read_file(FoundFile(path, path.name))


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
    reasons = {item.name: item.reason for item in skipped}
    assert set(reasons) == {".git", ".hidden.md", "picture.png", "out.txt", "in.txt", "loop"}
    assert "out of the folder" in reasons["out.txt"]
    assert "own name" in reasons["in.txt"]


def test_a_path_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    for path, reason in (
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path / "a.pdf", "convert it"),
        (Path("a\0b.txt"), "cannot be read|does not exist"),
        (tmp_path, "Nothing to read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            find_files([path])


def test_a_named_file_may_lie_anywhere_and_keeps_its_own_name_only(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "notes.md").write_text("words")
    files, _ = find_files([tmp_path / "x" / ".." / "notes.md"])
    assert [(file.name, file.explicit) for file in files] == [("notes.md", True)]


def test_a_file_name_that_is_not_utf_8_becomes_readable(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/gr\xfc\xdfe.txt", "wb") as stream:
        stream.write(b"words")
    files, _ = find_files([tmp_path])
    assert read_file(files[0]).name == "gr\ufffd\ufffde.txt"
