"""Queries from conversations, and documents truncated to fit their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from paceline.rag.prompt import MAX_QUERY, RELEVANCE_TEMPERATURE, passages_text, prompt_parts, query_of, relevance
from paceline.rag.records import Passage

PASSAGE = Passage("rules.md", 7, "Harbour rules", "No swimming after dusk. Dogs stay on a lead.", 0.5)


def said(*texts: str) -> list[dict[str, object]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("messages", "query"),
    [
        (said("Who owns the red boat in the harbour?"), "Who owns the red boat in the harbour?"),
        (
            said("Who is Ann?", "A painter.", "Where does the ferry to Elba leave?"),
            "Where does the ferry to Elba leave?",
        ),
        (said("Who is Ann Bell?", "A painter.", "Where does she live?"), "Who is Ann Bell? Where does she live?"),
        (
            said("Who is Ann Bell?", "A painter.", "And the phone number of Tom?"),
            "Who is Ann Bell? And the phone number of Tom?",
        ),
        (said("Who is Ann Bell?", "A painter.", "Why?"), "Who is Ann Bell? Why?"),
        (said("It?"), "It?"),
        (
            [*said("First question of some words?"), {"role": "assistant", "content": "Yes."}],
            "First question of some words?",
        ),
        ([{"role": "system", "content": "Be kind."}], ""),
        (said("  \n "), ""),
        ([{"role": "user", "content": None}], ""),
        ([], ""),
    ],
)
def test_the_query_is_the_last_question_with_the_one_it_depends_on(
    messages: Sequence[Mapping[str, object]], query: str
) -> None:
    assert query_of(messages) == query


def test_a_long_message_gives_its_beginning_and_its_end() -> None:
    query = query_of(said("Beginning " + "middle " * 5000 + "and what is the end?"))
    assert len(query) <= MAX_QUERY
    assert query.startswith("Beginning middle")
    assert query.endswith("and what is the end?")
    assert len(query_of(said("x" * 9000, "y", "z" * 9000))) <= MAX_QUERY
    assert len(query_of(said("x" * 9000, "y", "it?"))) <= MAX_QUERY


def test_relevance_is_the_cosine_over_one_temperature() -> None:
    assert relevance(PASSAGE) == pytest.approx(0.5 / RELEVANCE_TEMPERATURE)
    assert relevance(PASSAGE, 0.25) == pytest.approx(2.0)


def test_a_passage_stands_in_the_prompt_as_title_and_text() -> None:
    assert passages_text(PASSAGE) == "Harbour rules\nNo swimming after dusk. Dogs stay on a lead."
    assert passages_text(Passage("a", 1, "", " text\n", 0.1)) == "text"


def layout(messages: Sequence[Mapping[str, object]], document: str) -> tuple[list[int], list[int], list[int]]:
    """One token per character, two around the document."""
    return [1], [2, *document.encode(), 3], [len(messages)]


def document_of(limit: int) -> str | None:
    parts = prompt_parts(said("q"), passages_text(PASSAGE), layout, max_document_tokens=limit)
    return None if parts is None else bytes(parts[1][1:-1]).decode()


def test_a_document_is_cut_at_the_last_word_that_fits() -> None:
    whole = passages_text(PASSAGE)
    assert document_of(len(whole) + 2) == whole
    for limit in range(len(whole) + 2):
        document = document_of(limit)
        if document is None:
            assert limit < len("Harbour") + 2
            continue
        assert len(document) + 2 <= limit
        rest = whole[len(document) :]
        assert whole.startswith(document)
        assert rest[0].isspace()
        assert len(document) + 2 + len(rest.split()[0]) + 1 > limit, "another word would have fitted"
