"""Redaction: what holds of placeholders over any text, restoring in any division, and a table of what is found."""

from __future__ import annotations

import re
import sys
from typing import Literal
from unicodedata import normalize
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import redaction
from paceline.core.redaction import Entity, Redactor, Restorer, combined, find_entities
from paceline.core.words import seen

# Pieces that make placeholders, names and numbers, beside any text.
NAMED = (
    "Anna Berg|anna|Frau|Müller|[PERSON_1]|[person 2]|NUMBER_1|PERSON|_1|[|]|'s|\\_|a@b.de|+49 170 1234567|4711-0815"
)
OTHERS = (
    "https://x.de/a?b=1|12. März 1984|€ 1.200| |\n|. |ß|My name is |ich heiße |İ|DE89370400440532013000|12345|the |der "
)
PIECES = st.sampled_from([*NAMED.split("|"), *OTHERS.split("|")])
TEXTS = st.lists(PIECES | st.text(max_size=6), max_size=12).map("".join)
CONSONANTS = "bcdfghjklmnpqrstvwxz"
WORDS = re.compile(r"[^\W_]+")


def learnt(*texts: str) -> Redactor:
    redactor = Redactor()
    for text in texts:
        redactor.learn(text)
    return redactor


@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_what_is_redacted_is_restored_to_itself_whether_it_was_learnt_or_not(texts: list[str], other: str) -> None:
    redactor = learnt(*texts)
    for text in (*texts, other):
        assert redactor.restore(redactor.redact(text)) == seen(text)


@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_no_value_is_left_in_any_text(texts: list[str], other: str) -> None:
    redactor = learnt(*texts)
    given_texts = [redactor.redact(text) for text in (*texts, other)]
    for value in redactor.values:
        words = WORDS.findall(value)
        if redactor.redact(value).startswith("[TEXT_") or not 0 < len(words) <= 12:
            continue  # what looked like a placeholder may be one
        alone = re.compile(r"(?<![^\W_])" + re.escape(value) + r"(?![^\W_])")
        assert not any(alone.search(text) for text in given_texts), value


@given(TEXTS, st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join), st.data())
def test_pieces_of_a_stream_are_those_of_the_whole_in_any_division(
    learnt_text: str, said: str, data: st.DataObject
) -> None:
    redactor = learnt(learnt_text, "Anna Berg, 4711-0815")
    said = redactor.redact(learnt_text) + said + redactor.redact("Anna Berg")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=8)))
    restorer = Restorer(redactor)
    parts = [restorer.push(said[a:b]) for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert "".join([*parts, restorer.flush()]) == redactor.restore(said)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("[PERSON_1] and PERSON_1.", "Anna Berg and Anna Berg."),
        ("person_1's flat, [person_1's] flat, [Person 1]s flat", "Anna Berg's flat, Anna Berg's flat, Anna Bergs flat"),
        (r"PERSON\_1, **[PERSON_1]**, [[PERSON_1]]", "Anna Berg, **Anna Berg**, [Anna Berg]"),
        ("[PERSON_9] [SECRET_1] [PERSON_1", "[PERSON_9] [SECRET_1] [Anna Berg"),  # never given; not closed
        ("Person 1 and xPERSON_1", "Person 1 and xPERSON_1"),  # other words
    ],
)
def test_placeholders_are_known_as_models_write_them(said: str, meant: str) -> None:
    redactor = learnt("Frau Anna Berg")
    assert redactor.redact("Frau Anna Berg") == "Frau [PERSON_1]"
    assert redactor.restore(said) == meant


def test_an_entity_is_one_placeholder_in_all_messages_also_where_it_stands_alone_or_earlier() -> None:
    redactor = learnt("berg called.", "My name is Anna Berg, 0170 1234567.")
    hidden = redactor.redact("My name is Anna Berg, 0170 1234567. Anna Berg!")
    assert hidden == "My name is [PERSON_1], [PHONE_1]. [PERSON_1]!"
    other = redactor.redact("Is ANNA here, or Berg, at 0170/1234567? The iceberg.")
    assert not {"ANNA", "Berg", "1234567"} & set(WORDS.findall(other)) and other.endswith("The iceberg.")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("blank", [" ", "\u00a0", "\u202f"])
def test_the_form_of_letters_and_blanks_hides_and_shows_nothing(form: Literal["NFC", "NFD"], blank: str) -> None:
    text = (
        "My neighbour is Jürgen Schröder. Ich heiße Björn Ångström. Call +49 170 1234567, DE89 3704 0044 0532 0130 00."
    )
    other = "What does jürgen schröder pay, at 0170 1234567? An\u00adna, Schro\u00ad\u0308der"
    redactor = learnt(text, "Anna Berg")
    alike = learnt(normalize(form, text).replace(" ", blank), "Anna Berg")
    for each in (text, other):
        assert alike.redact(normalize(form, each).replace(" ", blank)) == redactor.redact(each)
    assert not {"Jürgen", "Ångström", "schröder", "Schröder", "1234567", "Anna"} & set(
        redactor.redact(text + other).split()
    )


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Please summarise this letter for my sister Anna.", "Please summarise this letter for my sister ."),
        ("How do I boil an egg? Add 17 and 23.", "How do I boil an egg? Add 17 and 23."),
        ("Wie kündige ich meinen Mietvertrag fristgerecht?", "Wie kündige ich meinen Mietvertrag fristgerecht?"),
        ("Der Vertrag mit Haverkamp endet am 31.12.2025.", "Der Vertrag mit  endet am ."),
        ("Herr Koch wohnt in der Lindenstraße 12a, 34117 Kassel.", "Herr  wohnt ."),
        ("mail me at a.b@c.org or see www.c.org/~ab.", "mail me at  or see ."),
        ("I paid $1,200.50 to DE89 3704 0044 0532 0130 00 in 2024.", "I paid  to  in 2024."),
        ("Her passport C01X00T47, plate M-AB 1234, ip 192.168.17.40.", "Her passport , plate , ip ."),
        ("Ich heiße jörn und wohne in kassel", "Ich heiße  und wohne in "),
    ],
)
def test_what_is_found_by_patterns(text: str, left: str) -> None:
    for entity in reversed(find_entities(text)):
        text = text[: entity.start] + text[entity.end :]
    assert text == left


def test_finders_together_hide_what_any_of_them_finds() -> None:
    words = combined(lambda _: [Entity(0, 4, "NAME")], lambda _: [Entity(2, 8, "PLACE")])
    assert words("Anna Berg") == [Entity(0, 4, "NAME"), Entity(4, 8, "PLACE")]


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "Aa ",
        "a1-",
        "1 ",
        "http://",
        "www. ",
        "[PERSON_",
        "a@",
        "DE00AA",
        "12.12.",
        "Ab Cd. ",
        "x.de/",
        "'",
        "Am Ab 1",
    ],
)
def test_the_time_is_that_of_the_length(text: str) -> None:
    """A quadratic one would end at the suite's limit."""
    text *= 40_000 // len(text)
    redactor = learnt(text)
    assert redactor.restore(redactor.redact(text)) == text
    restorer = Restorer(redactor)
    assert restorer.push(text) + restorer.flush() == redactor.restore(text)


def test_many_names_that_begin_alike_are_looked_up_by_their_lengths() -> None:
    names = [f"Al Q{first}{second}b" for first in CONSONANTS for second in CONSONANTS]
    text = ", ".join([*names, "Al Qbbb Berg", "Al"])
    redactor, looked = learnt(text), 0

    def count(_: object, event: str, called: object) -> None:
        nonlocal looked
        looked += event == "c_call" and getattr(called, "__name__", "") == "get"

    sys.setprofile(count)
    try:
        redacted = redactor.redact(text)
    finally:
        sys.setprofile(None)
    assert not any(name in redacted for name in names) and redactor.restore(redacted) == text
    assert looked < 10 * len(names)


@given(st.lists(TEXTS, min_size=1, max_size=6).map("\n".join))
def test_what_is_found_in_a_long_text_is_what_its_lines_hold(text: str) -> None:
    whole = sorted(find_entities(text))
    with patch.object(redaction, "_BLOCK", 1):
        assert sorted(find_entities(text)) == whole


def test_a_number_in_a_long_line_is_found_whole_wherever_it_stands() -> None:
    number = "+44 20 7946 0958"
    text = " and ".join([number] * 2_000)  # with a number at each place where it might be divided
    assert [text[each.start : each.end] for each in learnt_numbers(text)] == [number] * 2_000


def learnt_numbers(text: str) -> list[Entity]:
    return [each for each in redaction.find_numbers(text) if each.kind == "PHONE"]
