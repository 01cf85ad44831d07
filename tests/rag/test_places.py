"""Names of places in documents, and source code divided by its definitions."""

from __future__ import annotations

import time

import pytest

from paceline.rag.chunk import definitions, heading_starts, places, split
from paceline.rag.parsing.kinds import Kind

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


def test_pages_and_slides_are_counted_from_one() -> None:
    assert place_of("first second", "second", "pdf", (0, 6)) == "page 2"
    assert place_of("first second", "first second", "pptx", (0, 6)) == "slides 1\u20132"


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
    chunks = list(split("".join(functions), lambda text: len(text.split()), kind="code", chunk_tokens=16, overlap=0))
    starts = [chunk.text.split("(")[0] for chunk in chunks]
    assert starts == [f"def function_{number}" for number in range(6)]
    assert [chunk.place.split(", ")[1] for chunk in chunks] == [f"function_{number}" for number in range(6)]


@pytest.mark.parametrize("line", ["# " + " " * 200_000 + "x", "def" + " " * 200_000, "#" * 200_000, "pub " * 50_000])
def test_long_lines_take_no_longer_than_their_length(line: str) -> None:
    """Regular expressions that backtrack would take hours here."""
    before = time.process_time()
    heading_starts(line), definitions(line), places(line, "code")(0, 10)
    assert time.process_time() - before < 5.0
