"""Correctness of answers, choice of questions, and answers that need both sides."""

from __future__ import annotations

import pytest

from bench import two_sided
from bench.report import Options
from bench.two_sided import GENERATED, TOGETHER, Question, is_correct

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


def test_together_they_answer_what_neither_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_sided, "FEW", 4)
    report = two_sided.run(Options(quick=True))
    (row,) = report.rows
    assert row["questions"] == GENERATED and row["n"] == 4
    assert float(str(row[TOGETHER])) >= 0.5
    assert row["device only"] == row["cloud only"] == 0.0
