"""The shape of answers: what a question's words ask for, and edges that cut nothing."""

from __future__ import annotations

import pytest

from paceline.engine.reader.pointer import completed, cuts, misfits, with_dates_of


@pytest.mark.parametrize(
    ("question", "fitting", "other"),
    [
        ("Who runs the kiosk?", "Ada Bell", "ice cream"),
        ("What is the name of the ferry?", "Petrel", "blue"),
        ("When does the kiosk open?", "at noon", "Ada Bell"),
        ("By when must I pay?", "end of June", "the kiosk"),
        ("How much is the boat?", "12 an hour", "oars"),
        ("What does a ticket cost?", "nothing", "oars"),
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


@pytest.mark.parametrize("part", ["kiosk", "md", "ada", "example", "list_of"])
def test_a_part_of_a_file_s_name_or_an_address_cuts(part: str) -> None:
    document = "kiosk.md, list_of_ice, ada@kiosk.example."
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
        ("3 bargains", "3", "3"),
        ("quiet from half past ten", "ten", "half past ten"),
    ],
)
def test_what_belongs_to_an_answer_is_taken_in(document: str, part: str, whole: str) -> None:
    begin = document.index(part)
    assert document[slice(*completed(document, begin, begin + len(part)))] == whole


@pytest.mark.parametrize(
    ("document", "span", "whole"),
    [
        ("The captain is Captain Ostrey.", "Ostrey", "Captain Ostrey"),
        ("Visitors use Heron-Guest here.", "Heron", "Heron-Guest"),
        ("Visitors use Heron-Guest here.", "Guest", "Heron-Guest"),
        ("Key: blue-kettle-71.", "kettle", "blue-kettle-71"),
        ("Open 9-12 daily.", "9", "9"),
        ("The pier - the north one.", "pier", "pier"),
    ],
)
def test_a_span_is_brought_to_the_edges_of_words_with_hyphens_and_titles(document: str, span: str, whole: str) -> None:
    begin = document.rindex(span)
    begin, end = completed(document, begin, begin + len(span))
    assert document[begin:end] == whole


@pytest.mark.parametrize(
    ("question", "text", "is_misfit"),
    [
        ("How much was charged for consumption?", "2,914 kWh", True),
        ("How much was charged for consumption?", "909.17 EUR", False),
        ("What did the consumption cost?", "909.17", False),
        ("How much power did we use?", "2,914 kWh", False),
        ("Where is the boathouse?", "40 73 92", True),
        ("Where is the boathouse?", "Pier 4", False),
    ],
)
def test_money_is_no_weight_or_length_and_a_place_no_number_to_dial(question: str, text: str, is_misfit: bool) -> None:
    assert misfits(question, text) == is_misfit


@pytest.mark.parametrize(
    ("question", "document", "read"),
    [
        ("What broke on 29 October?", "2025-10-29 pump", "What broke on 2025-10-29?"),
        ("What broke on October 29th, 2025?", "29.10.2025 pump", "What broke on 29.10.2025?"),
        ("What broke on 2025-10-29?", "On 29 Oct the pump", "What broke on 29 Oct?"),
        ("What broke on 29 October 2024?", "2025-10-29 pump", "What broke on 29 October 2024?"),
        ("What broke on 29 October?", "29 October pump, 2025-10-29", "What broke on 29 October?"),
        ("May 5 people come?", "2025-06-05", "May 5 people come?"),
    ],
)
def test_a_date_is_read_in_the_document_s_writing(question: str, document: str, read: str) -> None:
    assert with_dates_of(document, question) == read
