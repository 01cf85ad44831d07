"""The bench of served workflows: what its agents decide, what is asked, and how its ratios are made."""

from __future__ import annotations

from bench.workflow.program import EVERY, ScriptedQueries
from bench.workflow.town import documents, questions
from bench.workflow_real import OURS, WAYS, Answered, Workload, _claims


def test_scripted_agents_decide_as_their_text_goes_on_and_the_rest_at_its_end() -> None:
    parser = ScriptedQueries(["one", "two", "three"])
    assert parser.feed("x" * (EVERY - 1)) == []
    assert parser.feed("x") == ["one"]
    assert not parser.done
    assert parser.end() == ["two", "three"]
    assert parser.end() == []


def test_each_question_needs_both_sides() -> None:
    texts = documents()
    for asked in questions():
        town = asked.question.removeprefix("When was the founder of the museum of ").removesuffix(" born?")
        assert f"The museum of {town} was founded by" in texts["device"]
        born = asked.script["rewrite"][1].removeprefix("When was ").removesuffix(" born?")
        assert f"{born} was born in" in texts["cloud"]


def test_a_claim_is_the_median_of_ratios_within_rounds_against_the_better_map() -> None:
    seconds = {OURS: [1.0, 2.0, 4.0], "static map": [2.0, 4.0, 4.0], "static map, cloud": [3.0, 6.0, 12.0]}
    seconds["core 0 alone"] = [3.0, 4.0, 8.0]
    taken = {("advanced", name): [Answered(each, "", {}, 0) for each in row] for name, row in seconds.items()}
    assert {way.name for way in WAYS} == set(seconds)
    claims = {claim.name: claim.value for claim in _claims(taken, Workload(workflows=("advanced",)))}
    assert claims == {"workflow.real_vs_static_advanced": 2.0, "workflow.real_vs_single_advanced": 2.0}
