"""The bench of answers, with the demonstration's reader; and what it counts as faithful."""

from __future__ import annotations

import pytest

from bench import answers
from bench.answers import ONE_CONTEXT, TOGETHER, WAYS, Outcome, reported
from bench.report import Options


def test_both_sides_answer_what_neither_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FEW", 2)
    report = answers.run(Options(quick=True))
    right = {(row["questions"], row["way"]): float(str(row["right"])) for row in report.rows}
    assert {way for _, way in right} == set(WAYS) - {ONE_CONTEXT[1]}, "both sides have the same model"
    assert right["two", TOGETHER] >= 0.5 and right["two", "device"] == right["two", "cloud"] == 0.0
    assert right["single", TOGETHER] >= max(right["single", "device"], right["single", "cloud"])
    assert {claim.name for claim in report.claims} == {
        f"answers.{name}" for name in ("two_vs_one_context", "single_vs_better_side", "none")
    }
    assert all(0.0 <= float(str(row["faithful"])) <= 1.0 for row in report.rows)


def test_published_questions_for_both_sides_are_pooled_and_the_worst_kind_is_told() -> None:
    def outcomes(right: int, of: int = 10) -> list[Outcome]:
        return [Outcome(each < right, True, False, 1) for each in range(of)]

    ours = dict.fromkeys(WAYS, outcomes(5))
    kinds = {
        **dict.fromkeys((*answers.OWN, *answers.ONE_SIDED), ours),
        "bridge": {**ours, TOGETHER: outcomes(8)},
        "inference": {**ours, TOGETHER: outcomes(4), "cloud": outcomes(7)},
    }
    values = {claim.name: claim.value for claim in reported(kinds, "models", {}, "").claims}
    assert values["answers.published_vs_one_context"] == pytest.approx(12 / 10)
    assert values["answers.published_worst_vs_better_side"] == pytest.approx(0.7)
