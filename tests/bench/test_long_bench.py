"""The bench of long questions: what is asked stands in the folder, once, and what it counts is what was given."""

from __future__ import annotations

from bench.long import BEST, IN_ORDER, OURS, QUESTIONS, SEARCH, Answered, is_right, plants, reported
from bench.report import Options


def test_each_question_has_one_answer_in_a_hundred_pages_that_are_equal_at_every_run() -> None:
    folder = plants()
    assert folder == plants() and len(folder.pages) == 100 and len(folder.questions) == QUESTIONS
    for question in folder.questions:
        pages = [page for page in folder.pages.values() if all(each in page for each in question.accepted)]
        assert pages or len(question.accepted) == 2, question  # two answers stand on a page each
        assert all(any(each in page for page in folder.pages.values()) for each in question.accepted)
        assert is_right(question, f"It is {', and '.join(question.accepted)}.") and not is_right(question, "It is 1.")


def test_ratios_are_of_the_same_questions() -> None:
    def answered(way: str, right: bool, tokens: int) -> list[Answered]:
        return [Answered(way, str(number), "", right, tokens, 1.0) for number in range(4)]

    ways = {OURS: (True, 100), SEARCH: (False, 50), IN_ORDER: (False, 1000), BEST: (True, 1000)}
    report = reported({"made": [each for way, of in ways.items() for each in answered(way, *of)]}, Options())
    claims = {claim.name: claim.value for claim in report.claims}
    assert claims["long.right_of_cloud_best"] == 1.0 and claims["long.tokens_of_cloud_best"] == 0.1
    assert len(report.rows) == 8
