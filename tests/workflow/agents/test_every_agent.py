"""Laws of all agents: no text raises, how it is cut changes nothing, decisions are within their limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings

from paceline.workflow.agents import MAX_STATEMENT, AgentParser, Evidence, Queries, Refined, look, plan, refine, rewrite
from tests.workflow.agents.texts import MILLS, QUESTION, cut_texts, read

EVIDENCE = tuple(Evidence.of(each) for each in MILLS)
PARSERS: dict[str, Callable[[], AgentParser[object, object]]] = {
    "rewrite": rewrite(QUESTION).parser,
    "plan": plan(QUESTION).parser,
    "look": look(QUESTION, EVIDENCE).parser,
    "refine": refine(QUESTION, MILLS).parser,
}


@pytest.mark.parametrize("stage", PARSERS)
@settings(max_examples=150)
@given(cut=cut_texts())
@example(cut=("", [""]))
@example(cut=("mill?\r\nmill!", ["mill?\r", "\nmill!"]))
def test_any_text_is_read_and_how_it_is_cut_changes_nothing(stage: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    whole, result = read(PARSERS[stage](), [text])
    assert (whole, result) == read(PARSERS[stage](), pieces) == read(PARSERS[stage](), list(text))
    match result:
        case Queries():
            most, max_chars = {"rewrite": (4, 300), "plan": (3, 200), "look": (2, 200)}[stage]
            assert tuple(whole) == result.texts and len(whole) <= most
            assert all(len(each) <= max_chars and each.splitlines() == [each] for each in result.texts)
            assert len({each.casefold() for each in result.texts}) == len(whole)
            if stage == "rewrite":
                assert whole and (not result.fallback or whole == [QUESTION])
        case Refined():
            assert tuple(whole) == result.evidence
            if result.fallback:
                assert result.evidence == EVIDENCE
            else:
                assert 1 <= len(whole) <= 4 and all(1 <= len(each.text) <= MAX_STATEMENT for each in result.evidence)
                assert all({*each.sources} <= {*MILLS} and "[1]" not in each.text for each in result.evidence)


@pytest.mark.parametrize("stage", PARSERS)
@settings(max_examples=60)
@given(cut=cut_texts())
def test_nothing_that_follows_matters_when_a_parser_is_done(stage: str, cut: tuple[str, list[str]]) -> None:
    parser, stopped = PARSERS[stage](), PARSERS[stage]()
    for piece in cut[1]:
        parser.feed(piece)
        if not stopped.done:
            stopped.feed(piece)
    assert parser.end() == stopped.end() and parser.result() == stopped.result()
