"""The bench of handing over, on made-up answers: its ends, its levels, and nothing is fitted on what is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import handoff
from lab.training.difficulty import as_good
from tests.lab.test_difficulty_training import records

KINDS = ("SQuAD", "GSM8K")


def test_always_and_never_are_the_ends_and_the_levels_lie_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "RESAMPLES", 40)
    found = [replace(each, kind=KINDS[at % 2]) for at, each in enumerate(records(80, 5))]
    learnt = handoff.folds(found)
    places = handoff.wanted(found, learnt)
    of = {each.name: each for each in found}
    continued = {(name, at): (7, of[name].cloud.right) for name, each in places.items() for at in each}
    report = handoff.reported(found, learnt, continued, "made up", quick=True)
    ways = {row["way"]: row for row in report.rows if row.get("part") == "way"}
    always, never = ways["always (cloud)"], ways["never (device)"]
    assert (always["tokens"], always["handed_over"], never["tokens"], never["handed_over"]) == (1.0, 80, 0.0, 0)
    assert always["random_kept"] == always["kept"]
    assert never["right"] == sum(each.device.right for each in found)
    assert ways["quality"]["right"] >= ways["cheap"]["right"] > never["right"]  # type: ignore[operator]  # numbers
    assert ways["quality"]["tokens"] >= ways["balanced"]["tokens"] >= ways["cheap"]["tokens"]  # type: ignore[operator]
    assert ways["best choice, in hindsight"]["right"] == sum(each.device.right or each.cloud.right for each in found)
    kinds = [row for row in report.rows if row.get("part") == "kind"]
    assert sum(int(str(row["right"])) for row in kinds if "balanced" in str(row["way"])) == ways["balanced"]["right"]
    calibrated = [row for row in report.rows if row.get("part") == "calibration"]
    came = sum(float(str(row["as_good"])) * int(str(row["n"])) for row in calibrated)
    assert came == pytest.approx(sum(map(as_good, found)), abs=0.1)
    claims = {claim.name: claim for claim in report.claims}
    assert claims["handoff.kept"].value == pytest.approx(float(str(ways["balanced"]["kept"])), abs=1e-3)
    assert claims["handoff.beyond_random"].value > 0.0, "made-up answers are wrong the more often, the less sure"
    assert handoff.plot(report).startswith("<svg") and handoff.draw_curve(report.rows).startswith("<svg")


def test_a_record_is_judged_by_what_was_learnt_of_others() -> None:
    found = records(60, 6)
    learnt = handoff.folds(found)
    spoilt = replace(found[0], device=replace(found[0].device, right=not found[0].device.right))
    again = handoff.folds([spoilt, *found[1:]])
    assert again[0] == learnt[0], "its own outcome is not known to its judge"
    assert again[1] != learnt[1], "and is to those of others"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("So there are 12 eggs, thus $1,018.", True),
        ("1018 is the sum of 1000 and 18", False),
        ("none", False),
        ("It is 1018.0", True),
    ],
)
def test_an_answer_that_reckons_is_its_last_number(text: str, right: bool) -> None:
    assert handoff._reckons("1018", text) == right
    assert handoff.stands([["France", "the Republic of France"]], "In france.") and not handoff.stands(
        [["Fran"]], "France"
    )
    assert handoff._says("no", "No, they are not; yes") and not handoff._says("yes", "none of them")
