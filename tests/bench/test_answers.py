"""The bench of answers, with the demonstration's reader; and what it counts as faithful."""

from __future__ import annotations

import pytest

from bench import answers
from bench.answers import ONE_CONTEXT, TOGETHER, WAYS
from bench.report import Options


def test_both_sides_answer_what_neither_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "FEW", 4)
    report = answers.run(Options(quick=True))
    right = {(row["questions"], row["way"]): float(str(row["right"])) for row in report.rows}
    assert {way for _, way in right} == set(WAYS) - {ONE_CONTEXT[1]}, "both sides have the same model"
    assert right["two", TOGETHER] >= 0.5 and right["two", "device"] == right["two", "cloud"] == 0.0
    assert right["single", TOGETHER] >= max(right["single", "device"], right["single", "cloud"])
    assert {claim.name for claim in report.claims} == {
        f"answers.{name}" for name in ("two_vs_one_context", "single_vs_better_side", "none")
    }
    assert all(0.0 <= float(str(row["faithful"])) <= 1.0 for row in report.rows)
