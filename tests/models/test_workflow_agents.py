"""Agents of a workflow with the shipped pair, which follows no instructions: fallbacks, and answers all the same."""

from __future__ import annotations

import json

import pytest

from lab.demo_pair import Pair
from paceline.models import CLOUD, DEVICE, SAMPLES
from paceline.workflow.agents.records import Evidence, SourcePassage
from paceline.workflow.agents.roles import (
    ANSWER,
    PLAN,
    REFINE,
    REWRITE,
    AnswerInputs,
    PlanInputs,
    RefineInputs,
    RewriteInputs,
    answer_document,
)

LIBRARY, WEDDING, _ = (entry["question"] for entry in json.loads((SAMPLES / "questions.json").read_text()))
SOURCES = tuple(
    SourcePassage((SAMPLES / name).read_text(), side, side == "device", name)
    for name, side in (("public/harbour-library.md", "cloud"), ("private/wedding.md", "device"))
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair.load(DEVICE, CLOUD, threads=1)


def test_the_prompt_is_that_of_a_document(pair: Pair) -> None:
    tokenizer = pair.models["device"].tokenizer
    inputs = AnswerInputs(LIBRARY, tuple(Evidence.of(source) for source in SOURCES))
    head, document, tail = tokenizer.document_prompt([{"role": "user", "content": LIBRARY}], answer_document(inputs))
    assert tokenizer.decode([*head, *document, *tail]) == tokenizer.decode(tokenizer.chat(ANSWER.messages(inputs)))


@pytest.mark.parametrize(("question", "value"), [(LIBRARY, "8:30 in the morning"), (WEDDING, "14 June")])
def test_what_stands_for_nonsense_is_answered_from(pair: Pair, question: str, value: str) -> None:
    """What the model writes without a document is what agents are given here: an apology, or words of nothing."""
    written = pair.answer(question, {"device": None})
    rewrite, refine = REWRITE.parser(RewriteInputs(question)), REFINE.parser(RefineInputs(question, SOURCES))
    plan = PLAN.parser(PlanInputs(question))
    for parser in (rewrite, refine, plan):
        parser.feed(written)
        parser.end()
    assert rewrite.result().texts == plan.result().texts == (question,)
    assert refine.result().fallback
    inputs = AnswerInputs(question, refine.result().evidence)
    answer = pair.answer(question, {"device": answer_document(inputs)})
    assert value in answer
    citing = ANSWER.parser(inputs)
    citing.feed(answer)
    assert citing.result().fallback and citing.result().sources == SOURCES
