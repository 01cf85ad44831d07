"""The final prompt, and citations of the final text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.workflow.agents.reading import CitationScanner, find_citations, without_citations
from paceline.workflow.agents.records import Evidence
from paceline.workflow.agents.roles import (
    ANSWER,
    MAX_CITATIONS,
    PREAMBLE,
    UNCITED,
    AnswerInputs,
    CitedAnswer,
    answer_document,
)
from tests.workflow.agents.texts import MILLS, QUESTION, TEXTS, passage, read

EVIDENCE = tuple(Evidence.of(each) for each in MILLS)
NUMBERS = st.text(alphabet="[]【】0123456789 ,;-–^s&†a", max_size=30)


def cited(text: str) -> CitedAnswer:
    return read(ANSWER.parser(AnswerInputs(QUESTION, EVIDENCE)), [text])[1]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        *(
            ("Red [1].", [1]),
            ("a [1][2] b [1]", [1, 2, 1]),
            ("[1, 3]", [1, 3]),
            ("[1-3]", [1, 2, 3]),
            ("[3–2]", [2, 3]),
        ),
        *(("[^2]", [2]), ("[source 2]", [2]), ("[Source 1, Source 2]", [1, 2]), ("【2†source】", [2]), ("[#3]", [3])),
        *(
            ("[0] [4] [99999] [-1]", []),
            ("[1.5] [a] [] [1 [x]", []),
            ("[1\n]", []),
            ("[" + "source 1, " * 5 + "source 1]", []),
        ),
        *(("[3, 4]", [3]), ("[1-9999]", [1, 2, 3]), ("[²] [１] [١]", []), ("[[2]]", [2]), ("[1] and [2", [1])),
        *(("`a[1]` is 3 [2]", [2]), ("```\na[1]\n```\nso [2]", [2]), ("it's `a[1]\n[3]", [3]), ("```a[1]```\n[2]", [])),
    ],
)
def test_numbers_name_the_sources_of_the_prompt(text: str, numbers: list[int]) -> None:
    result = cited(text)
    assert [each.number for each in result.citations] == numbers
    assert [each.source for each in result.citations] == [MILLS[number - 1] for number in numbers]
    assert result.fallback == (not numbers)
    assert result.sources == tuple(dict.fromkeys(MILLS[number - 1] for number in numbers)) or not numbers
    assert numbers or result.sources == MILLS


def test_a_citation_knows_its_place_and_its_source() -> None:
    parser = ANSWER.parser(AnswerInputs(QUESTION, EVIDENCE))
    assert parser.feed("Blue [") == parser.feed("2") == []
    (found,) = parser.feed("], of course.")
    assert "Blue [2], of course."[found.start : found.end] == "[2]"
    assert (found.source.title, found.source.side, found.source.document_id) == ("Blue mill", "web", "id of Blue mill")
    assert found.source.url == "https://example.org/Blue mill"


def test_the_citations_of_an_answer_are_limited() -> None:
    assert len(cited("[1-3]" * 200).citations) == MAX_CITATIONS


def test_an_answer_without_sources_is_an_ordinary_one() -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    inputs = AnswerInputs(QUESTION, (), talk)
    assert ANSWER.messages(inputs) == [*talk, {"role": "user", "content": QUESTION}]
    assert read(ANSWER.parser(inputs), ["Red [1]."])[1] == CitedAnswer((), (), fallback=False)


def test_sources_are_numbered_as_they_are_first_cited_and_stand_before_the_conversation() -> None:
    first, second, third = MILLS
    evidence = (
        Evidence.from_reading("The blue mill is older [9].", [second, first], MILLS),
        Evidence.from_reading("Mills turn.", [], MILLS),
        Evidence.of(third),
        Evidence.from_reading("The red mill is young.", [first], MILLS),
    )
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    inputs = AnswerInputs("Which\nmill [1]?", evidence, talk)
    system, *rest = ANSWER.messages(inputs)
    assert rest == [talk[1], {"role": "user", "content": "Which\nmill [1]?"}]
    assert system["content"] == f"{PREAMBLE}{answer_document(inputs)}\n\nBe brief."
    assert answer_document(inputs).splitlines()[1:] == [
        *("[1] Blue mill [2] Red mill", "> The blue mill is older (9)."),
        *(UNCITED, "> Mills turn."),
        *("[3] Brill", "> Brill lies in Buckinghamshire."),
        *("[2]", "> The red mill is young."),
    ]
    parser = ANSWER.parser(AnswerInputs(QUESTION, evidence))
    assert [each.source for each in parser.feed("[1] [2] [3] [4]")] == [second, first, third]


@settings(max_examples=40)
@given(picks=st.lists(st.tuples(TEXTS, st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=6))
def test_more_evidence_only_adds_to_the_prompt(picks: list[tuple[str, list[int]]]) -> None:
    """So what was read stays valid in the KV cache while more is refined."""
    sources = [passage(text, title=text[:9]) for text in ("red", "blue", "a\nb", "[2]", "")]
    evidence = [Evidence.from_reading(text, (sources[at] for at in chosen), sources) for text, chosen in picks]
    shown = [answer_document(AnswerInputs("?", tuple(evidence[:count]))) for count in range(1, len(evidence) + 1)]
    assert all(longer.startswith(f"{shorter}\n") for shorter, longer in pairwise(shown))


@settings(max_examples=300)
@given(text=NUMBERS)
def test_the_scanner_finds_what_a_search_of_the_line_finds(text: str) -> None:
    assert CitationScanner().feed(text) == find_citations(text)
    if "[" not in (rest := without_citations(text)):
        assert not find_citations(rest)
