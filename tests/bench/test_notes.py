"""The set of notes written by hand, and which answers are right, there and to real questions.

What the demonstration reads is measured by the bench.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import lab.training
from bench import two_sided
from bench.notes import SET, TUNING, Question, is_right, load
from paceline.engine.reader.answer import FIRST, JOINTS, NOTHING, NOTHING_OF_SEVERAL


def test_the_set_has_what_its_claims_need() -> None:
    documents, questions = load()
    kinds = Counter((each.kind, each.half) for each in questions)
    assert len(documents) >= 40 and {each.side for each in documents} == {"cloud", "device"}
    assert min(kinds["single", half] for half in ("dev", "test")) >= 60
    assert min(kinds[kind, half] for kind in ("two", "none") for half in ("dev", "test")) >= 16


@pytest.mark.parametrize("file", [SET, TUNING])
def test_each_accepted_text_stands_in_the_document_of_its_fact(file: Path) -> None:
    documents, questions = load(file)
    texts = {each.name: each.text.lower() for each in documents}
    sides = {each.name: each.side for each in documents}
    for question in questions:
        assert len(question.documents) == len(question.answers) == {"single": 1, "two": 2, "none": 0}[question.kind]
        for name, accepted in zip(question.documents, question.answers, strict=True):
            assert any(each.lower() in texts[name] for each in accepted), question
        if question.kind == "two":
            assert {sides[name] for name in question.documents} == {"cloud", "device"}


@pytest.mark.parametrize("file", [SET, TUNING])
def test_no_question_or_document_of_it_stands_in_the_training_texts(file: Path) -> None:
    folder = Path(lab.training.__file__).parent
    files = [each.read_text("utf-8").lower() for each in folder.rglob("*") if each.suffix in (".py", ".txt")]
    documents, questions = load(file)
    sentences = [part for each in documents for part in each.text.split(". ") if part.count(" ") > 2]
    for text in [each.text for each in questions] + sentences:
        assert not any(text.lower() in each for each in files), text


def test_what_is_tuned_on_claims_nothing_and_shares_no_document_with_what_does() -> None:
    documents, questions = load(TUNING)
    assert {each.half for each in questions} == {"dev"}
    assert not {each.text for each in documents} & {each.text for each in load()[0]}


@pytest.mark.parametrize(
    ("kind", "given", "right"),
    [
        ("two", f"{FIRST}9 eggs{JOINTS[0]}the blue folder.", True),
        ("two", f"{FIRST}19 eggs{JOINTS[0]}the blue folder.", False),
        ("two", f"{FIRST}9 eggs{JOINTS[0]}{NOTHING_OF_SEVERAL}.", False),
        ("none", f"{NOTHING}.", True),
        ("none", f"{FIRST}{NOTHING_OF_SEVERAL}{JOINTS[0]}{NOTHING_OF_SEVERAL}.", True),
        ("none", f"{FIRST}{NOTHING_OF_SEVERAL}{JOINTS[0]}blue.", False),
        ("none", "9 eggs.", False),
    ],
)
def test_an_answer_is_right_if_it_holds_each_fact_or_says_that_there_is_none(
    kind: str, given: str, right: bool
) -> None:
    answers = (("9",), ("blue", "azure")) if kind == "two" else ()
    assert is_right(Question(kind, "dev", "?", (), answers), given) == right


TWO_SIDED = two_sided.Question("When?", ("10th century", "no"), {}, is_exact=False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("In the 10th Century.", True),
        ("No.", True),
        ("Normandy, in the north", False),
        ("the 10th-century duke", False),
    ],
)
def test_a_real_answer_is_right_if_it_holds_the_expected_words(answer: str, expected: bool) -> None:
    assert two_sided.is_correct(TWO_SIDED, answer) == expected
