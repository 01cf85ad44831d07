"""Documents as people name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.rag.folders import matching
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
