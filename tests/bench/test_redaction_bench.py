"""The bench of redaction: where entities stand, what counts as hidden, and that its halves share no given name."""

from __future__ import annotations

import json

from bench.redaction import SET, MadeText, judge, made, replaced, run
from bench.report import Options


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
