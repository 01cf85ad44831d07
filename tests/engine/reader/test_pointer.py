"""Spans of the reader: they cut nothing, and beside others of its kind the value that is asked for comes first."""

from __future__ import annotations

import pytest

from paceline.engine.reader.engine import load_pointer
from paceline.engine.reader.place import Places, shared_words
from paceline.engine.reader.pointer import Pointer, _answer, with_line_marks
from paceline.models import READER


@pytest.fixture(scope="module")
def pointer() -> Pointer:
    return load_pointer(READER)


LEGACIES = """Legacies of Agnes Thorne

- Maud Thorne: the kayak
- Piers Lund: the microscope
- Hanna Reyes: the oak table
- Colin Thorne: what is left
"""
WILL = """Last will of Berta Falk

I, Berta Falk, of 3 Pond Road, make this my will. I leave my loom to my cousin Ada Winter. To my brother Karl I
give the brass lamps. The orchard shall pass to my daughter Lotte."""
CARD = """Appliance: chest freezer Polar
Model number: CF-310
Serial number: 5520-11876-K
Bought: 4 May 2022
"""
BRACE = "Dear Ms Lowe, the brace costs 1,400 EUR. Your fund pays 610 EUR, and 790 EUR are to be paid by you."
BILL = "Bill for the hearing aid: cost 1,870 EUR. The health plan pays 935 EUR; the rest is due in May."
THERMOSTAT = "[night]\nhour = 22\nwarm = 15.5\n\n[holiday]\nwarm = 11.5\n\n[frost]\nlimit = 4.0\n"
FENCE = "The old fence between numbers 7 and 9 will come down in May. Garrow puts up 14 panels of larch, each 2 m high."
QUOTE = "We can replace the felt and two rafters for £2,310 with VAT. We ask for 20 percent before.\n\nJ. Harrow"


ASKED = [
    ("Who gets the oak table?", LEGACIES, "Hanna Reyes"),
    ("Who receives the microscope?", LEGACIES, "Piers Lund"),
    ("Who gets the brass lamps?", WILL, "Karl"),
    ("What is the serial number of the freezer?", CARD, "5520-11876-K"),
    ("What is the model number of the freezer?", CARD, "CF-310"),
    ("What is the serial number?", "pump.model: P-9\npump.serialNumber: 66-41-R", "66-41-R"),
    ("What is the serial number?", "Model number | P-9\nSerial number | 66-41-R", "66-41-R"),
    ("How much of the cost of the hearing aid does the health plan pay?", BILL, "935 EUR"),
    ("What is the serial number of the lawn mower?", "Device: lawn mower Rex\nSerial no.: LM-4\n", "LM-4"),
    ("How much is the soup?", "Dish: Soup; Portion: 300 g; Price: 6.20", "6.20"),
    ("How much of the brace does the fund pay?", BRACE, "610 EUR"),
    ("Who gets the desk?", "# Move\n\n- Ada Penn: the desk\n- Rolf Quist: the radio\n- Sam: the bed", "Ada Penn"),
    ("How much is the loft?", "Room: Loft; Beds: 4; Floor: 3; Rate: 77", "77"),
    ("How much is a scooter?", "Vehicle: Scooter; Seats: 2; Fee per day: 31", "31"),
    ("How many weeks is the weaving course?", "Course: Weaving; Places: 11; Weeks: 7; Fee: 60", "7"),
    ("How warm is the house on holiday?", THERMOSTAT, "11.5"),
    ("How many panels are going up beside number 9?", FENCE, "14"),
    ("How many trees does the garden have?", "garden.trees: 6\ngarden.benches: 2", "6"),
    ("How much does Harrow want for the roof?", QUOTE, "£2,310"),
    ("Who repaired the boiler?", "boiler.model: T-4\nboiler.repairer: Odell Plumbing", "Odell Plumbing"),
]


def test_the_reader_takes_the_value_that_is_asked_for(pointer: Pointer) -> None:
    taken = [pointer.read(question, document).spans[0][0] for question, document, _ in ASKED]
    wrong = [(asked[0], found) for asked, found in zip(ASKED, taken, strict=True) if found != asked[2]]
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize(
    ("question", "document", "fitting", "other"),
    [
        ("What is the width of the door?", "Height: 2 m; Width: 1 m", "1 m", "2 m"),
        ("Who has the red key?", "- red key: Ann\n- blue key: Ben", "Ann", "Ben"),
        ("How much do I pay?", "Sum: 90 EUR\nAid: 50 EUR\nYour part: 40 EUR", "40 EUR", "90 EUR"),
        ("Where is the rug?", "Room: hall; Rug: red", "hall", "Room"),
        ("Who has the rug?", "Ann: the rug; the lamp\nBen: a bed", "Ann", "Ben"),
        ("How much was the rug?", "Rug, 2 m, 90 EUR", "90", "2"),
        ("How much was the rug?", "It was 90 EUR, and 9 EUR more.", "90 EUR", "90 EUR, and 9 EUR"),
        ("How much was the rug?", "item: rug; unit_price: 90; length: 2", "90", "2"),
    ],
)
def test_another_place_costs(question: str, document: str, fitting: str, other: str) -> None:
    def span(text: str) -> tuple[int, int]:
        begin = document.index(text)
        return begin, begin + len(text)

    best, worse = Places(question, document).costs([span(fitting), span(other)])
    assert best < worse


def test_where_no_place_fits_better_none_costs() -> None:
    assert Places("Who won?", "Ann lost.\nBen won.").costs([(0, 3), (10, 13)])[1] == 0.0
    assert Places("Why?", "Ann.\nBen.").costs([(0, 3), (5, 8)]) == [0.0, 0.0]
    assert Places("Why?", "").costs([]) == []
    assert Places("Who?", "a: b; " * 20_000).costs([(3, 4)]) == [0.0], "each part's sentence is looked at once"


def test_what_a_document_does_not_say_is_not_answered(pointer: Pointer) -> None:
    for question, document in (
        ("Who gets the piano?", LEGACIES),
        ("When was the freezer last repaired?", CARD),
        ("How much did the chimney sweep ask?", QUOTE),
        ("Where is the spare key?", WILL),
    ):
        assert pointer.read(question, document).answered < 0.5, question


@pytest.mark.parametrize(
    ("document", "span", "whole"),
    [
        ("It is -4 degrees.", "4 degrees", "-4 degrees"), ("It is -4 degrees.", "-4 degrees", "-4 degrees"),
        ("- 4 eggs", "4 eggs", "4 eggs"), ("from 3-4 eggs", "4 eggs", "4 eggs"), ("Written in C#.", "C", "C#"),
        ("Say --force twice.", "force", "--force"), ("a well-made bed", "made", "made"), ("-bed", "-bed", "bed"),
        ("By Andre\u0301.", "Andre", "Andre\u0301"), ("(the pier)", "(the pier)", "the pier"),
    ],
)  # fmt: skip
def test_an_answer_has_no_marks_around_it_but_those_of_its_own(document: str, span: str, whole: str) -> None:
    begin = document.index(span)
    assert _answer(document, begin, begin + len(span)) == (document.index(whole), whole)


@pytest.mark.parametrize("document", ["", "\n", "a\n\n  b: c \nd\n", "\r\n x"])
def test_each_line_s_end_has_a_mark_where_it_stands(document: str) -> None:
    marked = with_line_marks(document)
    assert len(marked) == len(document) and "\n" not in marked
    assert marked.count("|") == len(document.strip(" ").split("\n")) - 1 - document.count("\n\n")
    assert marked.replace("|", " ").split() == document.split()


def test_no_answer_cuts_a_word_a_number_or_an_address(pointer: Pointer) -> None:
    document = "Kiosk of Ada: 12.40 at 15:00 on 3.5.2024, ada_b@kiosk.example."
    for question in ("What does it cost?", "When is the kiosk open?", "What is the email address?", "Whose is it?"):
        for text, _ in pointer.read(question, document).spans:
            begin = document.index(text)
            end = begin + len(text)
            assert not (document[begin - 1 : begin].isalnum() and text[0].isalnum()), text
            assert not (document[end : end + 1].isalnum() and text[-1].isalnum()), text
            assert document[end : end + 1] not in (".", ":", "@", "_") or not document[end + 1 : end + 2].isalnum(), (
                text
            )


def test_an_answer_is_of_one_line_and_one_sentence(pointer: Pointer) -> None:
    document = "Ann has the red key. Ben has the blue one\nCleo; the shed\tDan"
    for question in ("Who has the blue key?", "Where is Cleo?"):
        for text, _ in pointer.read(question, document).spans:
            assert not any(mark in text for mark in ("\n", "\t", ";", ". ")), text


def test_an_answer_is_one_with_an_article_and_without(pointer: Pointer) -> None:
    (first, share), *rest = pointer.read("Where is the regatta?", "The regatta is on 3 June at the Old Quay.").spans
    assert share > 0.9 and "Old Quay" in first and "the Old Quay" not in [text for text, _ in rest]


def test_words_are_shared_by_their_first_letters() -> None:
    assert shared_words("What do fishing tents weigh?", "A tent, or fishi-ng, tents: 8 kg") == pytest.approx(2 / 3)
    assert shared_words("What is it?", "It is a tent.") == 0.0
