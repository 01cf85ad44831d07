"""`paceline bench leakage`: its classifier finds a difference where there is one, and its guesses are what they say.

A whole run, small, is R31 of the reliability scenarios.
"""

from __future__ import annotations

import random

from bench.guess_scores import Scored
from bench.leakage import corpus, text_of


def test_the_classifier_finds_a_difference_and_invents_none() -> None:
    rng = random.Random(1)
    members = [[rng.gauss(1.0, 1.0), rng.gauss(0.0, 1.0)] for _ in range(400)]
    others = [[rng.gauss(0.0, 1.0), rng.gauss(0.0, 1.0)] for _ in range(400)]
    assert 0.71 < Scored.of(members, others).area() < 0.81  # 0.76 for two normal distributions one deviation apart
    assert 0.42 < Scored.of([each[1:] for each in members], [each[1:] for each in others]).area() < 0.58
    assert Scored.of([[1.0]] * 10, [[1.0]] * 10).area([3, 3, 8]) == 0.5


def test_a_member_stands_in_its_document_and_the_others_do_not() -> None:
    documents, guesses = corpus(random.Random(2), 30)
    found = sum(guess.value in text for text, guess in zip(documents, guesses["member"], strict=True))
    assert found == 30
    strangers = [guess for kind in ("other subject", "other value") for guess in guesses[kind]]
    assert sum(guess.sentence in text for guess in strangers for text in documents) == 0
    (guess, *_) = guesses["member"]
    assert text_of(guess, guess.sentence)[0] == 1.0 > text_of(guess, "I do not know.")[0]
