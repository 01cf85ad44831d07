"""What a message asks, and the parts that are answered one after the other."""

from __future__ import annotations

import pytest

from paceline.engine.reader.question import asked, parts_of


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("When is the bakery open?", ("When is the bakery open?",)),
        ("who keeps the spare key", ("Who keeps the spare key?",)),
        (
            "What is the password for our wifi and who is the captain of the ferry Marabel?",
            ("What is the password for our wifi?", "Who is the captain of the ferry Marabel?"),
        ),
        (
            "At what time does my train leave, and from which platform does the bus go?",
            ("At what time does my train leave?", "From which platform does the bus go?"),
        ),
        ("Who has the key? What is the code?", ("Who has the key?", "What is the code?")),
        (
            "What are the code of the garage and the opening hour of the library?",
            ("What is the code of the garage?", "What is the opening hour of the library?"),
        ),
        ("Where are the spare fuses and the manual?", ("Where is the spare fuses?", "Where is the manual?")),
        ("When do the library and my gym close?", ("When does the library close?", "When does my gym close?")),
        ("Tell me the code of the gate and the price of a stall.", ("Tell me the code of the gate?",
                                                                   "Tell me the price of a stall?")),
        ("When does the ferry leave and how much does it cost?", ("When does the ferry leave?",
                                                                "How much does the ferry cost?")),
    ],
)  # fmt: skip
def test_a_question_is_cut_where_it_asks_for_something_else(message: str, parts: tuple[str, ...]) -> None:
    assert parts_of(message) == parts


@pytest.mark.parametrize(
    "message",
    [
        "Who sells bread and butter?",
        "When is the bed and breakfast open?",
        "What did Anna and Ben order?",
        "Which colour is the black and white cat's collar?",
    ],
)
def test_things_that_belong_together_stay_together(message: str) -> None:
    assert len(parts_of(message)) == 1


def test_what_stands_before_a_question_is_not_asked() -> None:
    assert asked("The alarm code is 4411.\nWhat is the alarm code?") == (
        "The alarm code is 4411.",
        "What is the alarm code?",
    )
    assert asked("Hello there") == ("", "Hello there")


@pytest.mark.parametrize("message", ["", " ", "?", "and and?", "\n\n", "?" * 500, "and what " * 300])
def test_any_message_has_at_least_one_part_and_at_most_three(message: str) -> None:
    assert 1 <= len(parts_of(message)) <= 3
