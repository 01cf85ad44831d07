"""Correctness of answers, choice of questions, and answers that need both sides."""

from __future__ import annotations

import pytest

from bench.two_sided import Question, is_correct

QUESTION = Question("When?", ("10th century", "no"), {}, is_exact=False)


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
    assert is_correct(QUESTION, answer) == expected
