"""Benches of what is hidden, of what leaks, and of constraints: each can fail."""

from __future__ import annotations

import json
import random

import pytest

from bench.constraints import FORMS, judged, linked_nodes
from bench.guess_scores import Scored
from bench.leakage import corpus, text_of
from bench.redaction import SET, MadeText, judge, made, replaced, run
from bench.report import Options
from paceline.strategies.base import Strategy
from paceline.strategies.registry import STRATEGIES


def test_what_is_left_of_an_entity_is_told_word_by_word() -> None:
    text = "Ask Anna Berg (0170 5550123) in 17 days."
    entities = ((4, 13, "person"), (15, 27, "phone"), (32, 34, "number"), (28, 29, "gap"))
    judged, needed = judge([MadeText(text, entities)])
    assert [(each.value, each.left) for each in judged[:3]] == [("Anna Berg", ""), ("0170 5550123", ""), ("17", "17")]
    assert needed == [True, True] and [text[low:high] for low, high in replaced(text)] == ["Anna Berg", "(0170 5550123"]


def test_made_texts_have_their_entities_where_they_say_and_the_halves_are_apart() -> None:
    halves = json.loads(SET.read_text("utf-8"))
    assert not set(halves["dev"]["first"]) & set(halves["test"]["first"])
    assert not set(halves["dev"]["en"]) & set(halves["test"]["en"])
    for language in ("en", "de"):
        texts = made(halves["test"], language, 1)
        assert len(texts) == len(halves["test"][language]) and texts == made(halves["test"], language, 1)
        assert all(text.text[start:end].strip() for text in texts for start, end, _ in text.entities)


def test_a_report_has_a_claim_for_each_language_and_says_what_leaks() -> None:
    report = run(Options(quick=True))
    assert [claim.name for claim in report.claims] == [
        f"redaction.{name}_{language}" for language in ("en", "de") for name in ("hidden", "needed")
    ]
    assert all(0.6 < claim.value <= 1.0 for claim in report.claims)
    assert any(row.get("part") == "leaks" for row in report.rows)


# ---- `paceline bench leakage` ---------------------------------------------------------------------------------------
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


# ---- `paceline bench constraints` -----------------------------------------------------------------------------------
def test_the_validation_accepts_only_fitting_answers() -> None:
    person, tree, calls = FORMS
    assert person.holds('{"name": "Ada", "age": 36}') and tree.holds('{"left": {"on": true}}')
    assert calls.holds('<tool_call>\n{"name": "tree", "arguments": {"left": {}}}\n</tool_call>')
    for wrong in ("", "{", "[]", '{"name": "Ada"}', '{"name": "Ada", "age": -1}', '{"left": {"on": 1}}'):
        assert not person.holds(wrong) and not tree.holds(wrong) and not calls.holds(wrong)
    assert not calls.holds('<tool_call>\n{"name": "tree", "arguments": {"right": {}}}\n</tool_call>')
    assert not calls.holds('<tool_call>\n{"name": "wood", "arguments": {"left": {}}}\n</tool_call>')


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.anyio
async def test_every_answer_validates_in_every_strategy(strategy: Strategy) -> None:
    # Each form on both sides, one answer greedy. The bench itself makes 1,000, by itself, and with 8 and 32 at once.
    runs = 2 * len(FORMS)
    async with linked_nodes() as nodes:
        outcome = await judged(nodes, strategy, runs, 8)
        assert (outcome.runs, outcome.valid) == (runs, runs)
        assert all(node.load().answers == 0 for node in nodes.values())
