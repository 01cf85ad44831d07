"""Questions with one fact on each side, asked of a real pair after each workflow: answered, with citations of both."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.two_hop import ask, serving
from bench.two_sided import generated

QUESTIONS = list(generated(6))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(QUESTIONS) as url:
        yield url


def test_generated_two_hop_questions_are_answered_with_citations_of_both_sides(url: str) -> None:
    with httpx.Client(timeout=120.0) as client:
        answers = [ask(client, url, question, "advanced") for question in QUESTIONS]
    assert [answer.degraded for answer in answers] == [None] * len(QUESTIONS)
    assert sum({"device", "cloud"} <= answer.sides for answer in answers) >= 4, answers
    assert sum(answer.right for answer in answers) >= 3, answers
