"""Chunking: coverage, sizes, overlap, boundaries, titles and places."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rag import chunk as chunk_module
from paceline.rag.chunk import Chunk, definitions, heading_starts, places
from paceline.rag.parsing.kinds import Kind


def split(text: str, count: Callable[[str], int], **options: Any) -> list[Chunk]:
    return list(chunk_module.split(text, count, **options))


def words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


BITS = [
    "word", "Two words.", " ", "\n", "\n\n", "# Heading\n", "```\n# code\n", "a" * 90, "\u4f60\u597d\u3002", "e\u0301",
    "x.y", "!\n",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(BITS) | st.text(max_size=8), max_size=80).map("".join)


@settings(max_examples=120, deadline=None)
@given(TEXTS, st.integers(8, 40), st.data())
def test_chunks_cover_every_character_in_order_and_keep_their_size(text: str, size: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, size // 2))
    count = data.draw(st.sampled_from([words, len]))
    chunks = split(text, count, chunk_tokens=size, overlap=overlap)
    assert chunks == split(text, count, chunk_tokens=size, overlap=overlap)
    reached = 0
    for chunk in chunks:
        assert chunk.start <= reached < chunk.end
        assert chunk.text == text[chunk.start : chunk.end]
        assert count(chunk.text) <= size
        assert count(text[chunk.start : reached]) <= overlap
        reached = chunk.end
    assert reached == len(text)
    starts = [chunk.start for chunk in chunks]
    assert starts == sorted(set(starts))


def test_chunks_end_at_paragraphs_rather_than_in_sentences() -> None:
    paragraph = "The first sentence has nine words in all here. The second has some words too.\n\n"
    chunks = split(paragraph * 6, words, chunk_tokens=40, overlap=0)
    assert all(chunk.text == paragraph * 2 for chunk in chunks)


def test_a_heading_begins_a_chunk_and_is_never_left_at_the_end_of_one() -> None:
    section = "## Part\n\n" + "Some words stand here. " * 5 + "\n\n"
    chunks = split(section * 5, words, chunk_tokens=45, overlap=10)
    assert [chunk.text for chunk in chunks] == [section] * 5


def test_a_hash_in_a_code_fence_is_not_a_heading() -> None:
    code = "```\n" + "# a comment of five words\n" * 8 + "```\n"
    assert len(split("Words. " * 3 + code, words, chunk_tokens=200, overlap=0)) == 1
    fenced = split(code * 3, words, chunk_tokens=40, overlap=8)
    assert any(after.start < before.end for before, after in pairwise(fenced)), "nothing repeats across headings"


SHEETS = "# Fees\nBerth | Fee\nBerth: 7; Fee: 12\nBerth: 8; Fee: 14\n# Boats\nName\nMarabel\n\nHeron"
TABLE = ["# Rooms\n\nName: Fee\nRoom: A; Beds: 2\n", "Room: B; Beds: 1; View: yard\n\n", "Note: a; b; c: d\nEnd."]
RECORDS = {
    "docx": ("".join(TABLE), TABLE),
    "csv": ("Name: Ann; Age: 7\n\nName: Bo; Age: 8\n", ["Name: Ann; Age: 7\n\n", "Name: Bo; Age: 8\n"]),
    "xlsx": (SHEETS, [SHEETS[:37], "Berth: 8; Fee: 14\n", "# Boats\nName\nMarabel\n\n", "Heron"]),
    "json": ("a: 1\nb: 2\n\nc[0]: d: 3\n\nc[1]: d: 4", ["a: 1\nb: 2\n\n", "c[0]: d: 3\n\n", "c[1]: d: 4"]),
    "log": (
        "10:00 begun\n10:01 failed\n  at line 3\n[10:02] ended",
        ["10:00 begun\n", "10:01 failed\n  at line 3\n", "[10:02] ended"],
    ),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_is_a_chunk_of_its_own_where_there_are_not_too_many(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, parts = RECORDS[kind]
    assert [chunk.text for chunk in split(text, words, kind=kind)] == parts
    long = split(parts[-1] + "\n" + "word " * 200 + "\n" + text, words, kind=kind, chunk_tokens=40, overlap=8)
    assert max(words(chunk.text) for chunk in long) <= 40 and long[-1].text == parts[-1]
    monkeypatch.setattr(chunk_module, "MAX_RECORDS", 1)
    assert [chunk.text for chunk in split(text, words, kind=kind)] == [text]


def test_neighbours_share_whole_sentences() -> None:
    text = " ".join(f"Sentence number {i} is here." for i in range(30))
    chunks = split(text, words, chunk_tokens=30, overlap=8)
    for before, after in pairwise(chunks):
        shared = text[after.start : before.end].strip()
        assert re.fullmatch(r"Sentence number \d+ is here\.", shared), shared


def test_each_chunk_has_the_title_unless_it_begins_with_it() -> None:
    text = "# Harbour rules\n\n" + "No swimming here. " * 30
    chunks = split(text, words, title="Harbour rules", chunk_tokens=40, overlap=4)
    assert [chunk.title for chunk in chunks] == [""] + ["Harbour rules"] * (len(chunks) - 1)
    assert chunks[0].titled == chunks[0].text
    assert chunks[1].titled.startswith("Harbour rules\nNo swimming")


def test_a_text_without_spaces_is_split_within_the_chunk_size() -> None:
    chunks = split("x" * 5000, len, chunk_tokens=100, overlap=20)
    assert max(len(chunk.text) for chunk in chunks) <= 100
    assert split("", len) == []
    assert split("one", len) == [Chunk(0, 3, "one", "")]


# ---- names of places in documents, and source code divided by its definitions ---------------------------------------
CODE = """import os


# Says where the lamp is.
@cached
def lamp(town):
    return os.path.join(town, "lamp")


class Keeper:
    def __init__(self, name):
        self.name = name

    async def light(self):
        await self.match()
"""


def place_of(text: str, part: str, kind: Kind, pages: tuple[int, ...] = ()) -> str:
    start = text.index(part)
    return places(text, kind, pages)(start, start + len(part))


MARKDOWN = "Before.\n\n# Harbour\n\nText.\n\n## Fees ##\n\nTwelve marks.\n\n```\n# no heading\n```\nEnd."
PLACES = [
    (MARKDOWN, "Before.", "markdown", ""),
    (MARKDOWN, "Before.\n\n# Harbour", "markdown", "Harbour"),
    (MARKDOWN, "Text.", "docx", "Harbour"),
    (MARKDOWN, "End.", "markdown", "Fees"),
    ("one\ntwo\nthree\n", "two", "text", "line 2"),
    ("one\ntwo\nthree\n", "two\nthree\n", "text", "lines 2\u20133"),
    ("a: 1\na: 2\n", "a: 2", "csv", "row 2"),
    ("users[0].name: Ann\nusers[0].age: 7", "users[0].age", "json", "users[0].age"),
    (CODE, 'return os.path.join(town, "lamp")', "code", "line 7, lamp"),
    (CODE, "await self.match()", "code", "line 15, light"),
    (CODE, "import os", "code", "line 1"),
]


@pytest.mark.parametrize(("text", "part", "kind", "place"), PLACES)
def test_a_part_is_placed_by_its_heading_lines_rows_path_or_definition(
    text: str, part: str, kind: Kind, place: str
) -> None:
    assert place_of(text, part, kind) == place


@given(st.text("ab:\n ", max_size=40))
def test_a_path_is_what_stands_before_a_colon_in_the_line(text: str) -> None:
    place = places(text, "json")
    for start in range(len(text)):
        line = text[text.rfind("\n", 0, start) + 1 :].split("\n")[0]
        assert place(start, start + 1) == (line.split(": ")[0] if ": " in line else "")


def test_a_line_is_looked_through_once_for_all_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    path = chunk_module._path

    def noted(text: str, breaks: Sequence[int], line: int) -> str:
        looked.append(line)
        return path(text, breaks, line)

    monkeypatch.setattr(chunk_module, "_path", noted)
    place = places("a: 1\nb.c: " + "word " * 1000 + "\nd", "json")
    assert {place(start, start + 9) for start in range(5, 5000, 9)} == {"b.c"}
    assert looked == [1]


def test_pages_and_slides_are_counted_from_one() -> None:
    assert place_of("first second", "second", "pdf", (0, 6)) == "page 2"
    assert place_of("first second", "first second", "pptx", (0, 6)) == "slides 1\u20132"


def test_what_looks_like_a_fence_hides_no_heading_behind_it() -> None:
    fences = ("```code```", "````\n```\n# no\n````", "~~~ text\n```\n# no\n~~~", "``` sh\n# no\n``` sh\n# no\n```  ")
    for fence in fences:
        assert [words for _, _, words in heading_starts(f"# Guide\n{fence}\n# Hours\n")] == ["Guide", "Hours"], fence


def test_definitions_begin_with_the_comments_and_decorators_above_them() -> None:
    assert [(CODE[start:].splitlines()[0].strip(), name) for start, name in definitions(CODE)] == [
        ("# Says where the lamp is.", "lamp"),
        ("class Keeper:", "Keeper"),
        ("def __init__(self, name):", "__init__"),
        ("async def light(self):", "light"),
    ]
    others = {
        "func (s *Server) Serve() error {": "Serve", "pub(crate) fn walk(": "walk",
        "export default function go() {": "go",
        "public static final class Lamp {": "Lamp", "impl<T> Tree {": None, "define = 3": None, "classic(1)": None,
    }  # fmt: skip
    for line, name in others.items():
        assert [found for _, found in definitions(line)] == ([] if name is None else [name]), line


def test_code_is_divided_where_functions_begin() -> None:
    functions = [f"def function_{number}():\n" + "    work()\n" * 12 for number in range(6)]
    chunks = split("".join(functions), lambda text: len(text.split()), kind="code", chunk_tokens=16, overlap=0)
    starts = [chunk.text.split("(")[0] for chunk in chunks]
    assert starts == [f"def function_{number}" for number in range(6)]
    assert [chunk.place.split(", ")[1] for chunk in chunks] == [f"function_{number}" for number in range(6)]


@pytest.mark.parametrize("line", ["# " + " " * 200_000 + "x", "def" + " " * 200_000, "#" * 200_000, "pub " * 50_000])
def test_long_lines_take_no_longer_than_their_length(line: str) -> None:
    """Regular expressions that backtrack would take hours here."""
    before = time.process_time()
    heading_starts(line), definitions(line), places(line, "code")(0, 10)
    assert time.process_time() - before < 5.0
