"""The shape of answers: what a question's words ask for, and edges that cut nothing."""

from __future__ import annotations

import pytest

from paceline.engine.reader.shape import completed, cuts, misfits


@pytest.mark.parametrize(
    ("question", "fitting", "other"),
    [
        ("Who runs the kiosk?", "Ada Bell", "ice cream"),
        ("With whom is the key?", "Mr Bell", "brass"),
        ("What is the name of the ferry?", "Petrel", "blue"),
        ("When does the kiosk open?", "at noon", "Ada Bell"),
        ("By when must I pay?", "end of June", "the kiosk"),
        ("On which day is it closed?", "Mondays", "the kiosk"),
        ("How much is the boat?", "12 an hour", "oars"),
        ("How often does it sail?", "twice a day", "oars"),
        ("For how long is it let?", "until September", "oars"),
        ("What does a ticket cost?", "nothing", "oars"),
        ("What was the last price?", "4.50", "oars"),
        ("What is the email address of the kiosk?", "ada@kiosk.example", "Ada Bell"),
        ("What is Ada's phone number?", "0340 115", "KN-40"),
    ],
)
def test_a_question_asks_for_a_shape(question: str, fitting: str, other: str) -> None:
    assert misfits(question, other) and not misfits(question, fitting)


@pytest.mark.parametrize("question", ["Where is the kiosk?", "Why is it shut?", "What happens when it rains?", ""])
def test_what_no_rule_knows_has_any_shape(question: str) -> None:
    assert not misfits(question, "oars") and not misfits(question, "12")


@pytest.mark.parametrize("part", ["2", "40", "iosk", "15", "12.4", "Kios", "12.40 a"])
def test_a_part_that_ends_within_a_word_or_number_cuts(part: str) -> None:
    document = "Kiosk: 12.40 at 15:00."
    begin = document.index(part)
    assert cuts(document, begin, begin + len(part))


@pytest.mark.parametrize("part", ["Kiosk", "12.40", "15:00", "12.40 at 15:00", "15:00."])
def test_whole_words_and_numbers_are_not_cut(part: str) -> None:
    document = "Kiosk: 12.40 at 15:00."
    begin = document.index(part)
    assert not cuts(document, begin, begin + len(part))


@pytest.mark.parametrize(
    ("document", "part", "whole"),
    [
        ("due by the end of June, or later", "June", "the end of June"),
        ("tyres: 4.5 bar all round", "4.5", "4.5 bar"),
        ("paid 30% of it", "30", "30%"),
        ("ask Dr Amsel", "Amsel", "Dr Amsel"),
        ("3 bargains", "3", "3"),
        ("room 12", "12", "12"),
        ("quiet from half past ten", "ten", "half past ten"),
        ("in June", "June", "June"),
    ],
)
def test_what_belongs_to_an_answer_is_taken_in(document: str, part: str, whole: str) -> None:
    begin = document.index(part)
    assert document[slice(*completed(document, begin, begin + len(part)))] == whole
