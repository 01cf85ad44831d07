"""Laws of all agents: no text raises, how it is cut changes nothing, decisions are within their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings

from paceline.workflow.agents import MAX_STATEMENT, Evidence, ListParser, look, plan, refine, rewrite
from tests.workflow.agents.texts import MILLS, QUESTION, cut_texts, read

EVIDENCE = [Evidence.of(each) for each in MILLS]
PARSERS: dict[str, Callable[[], ListParser[Any]]] = {
    "rewrite": rewrite(QUESTION).parser,
    "plan": plan(QUESTION).parser,
    "look": look(QUESTION, EVIDENCE).parser,
    "refine": refine(QUESTION, MILLS).parser,
}


def outcome(parser: ListParser[Any]) -> tuple[object, ...]:
    return parser.found, parser.fallback, parser.declined


@pytest.mark.parametrize("stage", PARSERS)
@settings(max_examples=100)
@given(cut=cut_texts())
@example(cut=("", [""]))
@example(cut=("mill?\r\nmill!", ["mill?\r", "\nmill!"]))
def test_any_text_is_read_and_how_it_is_cut_changes_nothing(stage: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    whole = read(PARSERS[stage](), [text])
    found = whole.found
    assert outcome(whole) == outcome(read(PARSERS[stage](), pieces)) == outcome(read(PARSERS[stage](), list(text)))
    if stage == "refine":
        if whole.fallback:
            assert found == EVIDENCE
        else:
            assert 1 <= len(found) <= 4 and all(1 <= len(each.text) <= MAX_STATEMENT for each in found)
            assert all({*each.sources} <= {*MILLS} and "[1]" not in each.text for each in found)
        return
    most, max_chars = {"rewrite": (4, 300), "plan": (3, 200), "look": (2, 200)}[stage]
    assert len({each.casefold() for each in found}) == len(found) <= most
    assert all(len(each) <= max_chars and each.splitlines() == [each] for each in found)
    if stage == "rewrite":
        assert found and (not whole.fallback or found == [QUESTION])


@pytest.mark.parametrize("stage", PARSERS)
@settings(max_examples=60)
@given(cut=cut_texts())
def test_nothing_that_follows_matters_when_a_parser_is_done(stage: str, cut: tuple[str, list[str]]) -> None:
    parser, stopped = PARSERS[stage](), PARSERS[stage]()
    for piece in cut[1]:
        parser.feed(piece)
        if not stopped.done:
            stopped.feed(piece)
    assert parser.end() == stopped.end() and outcome(parser) == outcome(stopped)
