"""Agents of a workflow with the shipped pair, which follows no instructions: fallbacks, and answers all the same."""

from __future__ import annotations

import json

import pytest

from lab.demo_pair import Pair
from paceline.models import CLOUD, DEVICE, SAMPLES
from paceline.workflow.agents import SourcePassage, plan, quoted_passages, refine, rewrite

LIBRARY, WEDDING, _ = (entry["question"] for entry in json.loads((SAMPLES / "questions.json").read_text()))
SOURCES = tuple(
    SourcePassage((SAMPLES / name).read_text(), side, side == "device", name)
    for name, side in (("public/harbour-library.md", "cloud"), ("private/wedding.md", "device"))
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.load(DEVICE, CLOUD, threads=1)


@pytest.mark.parametrize(("question", "value"), [(LIBRARY, "8:30 in the morning"), (WEDDING, "14 June")])
def test_what_stands_for_nonsense_is_answered_from(pair: Pair, question: str, value: str) -> None:
    """What the model writes without a document is what agents are given here: an apology, or words of nothing."""
    written = pair.answer(question, {"device": None})
    rewriting, refining, planning = (
        rewrite(question).parser(),
        refine(question, SOURCES).parser(),
        plan(question).parser(),
    )
    for parser in (rewriting, refining, planning):
        parser.feed(written)
        parser.end()
    assert rewriting.found == planning.found == [question]
    assert refining.fallback
    read = [source for each in refining.found for source in each.sources]
    assert value in pair.answer(question, {"device": quoted_passages(read, 2000)})
