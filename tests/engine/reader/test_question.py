"""What a message asks, and the parts that are answered one after the other."""

from __future__ import annotations

import json

import pytest

from paceline.engine.reader.question import ABILITIES, CANNOT, MAX_CHARACTERS, asked, is_foreign, own_answer, parts_of
from paceline.models import SAMPLES

SUM = "What is the sum of the bill for the roof and the bill for the door?"


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("who keeps the spare key", ("Who keeps the spare key?",)),
        (
            "What is the password for our wifi and who is the captain of the ferry Marabel?",
            ("What is the password for our wifi?", "Who is the captain of the ferry Marabel?"),
        ),
        (
            "What are the code of the garage and the opening hour of the library?",
            ("What is the code of the garage?", "What is the opening hour of the library?"),
        ),
        (
            "What is the code of the garage and the email of the caretaker?",
            ("What is the code of the garage?", "What is the email of the caretaker?"),
        ),
        ("What is the name of the inn and the brewery?", ("What is the name of the inn and the brewery?",)),
        (SUM, (SUM,)),
        ("Where are the spare fuses and the manual?", ("Where is the spare fuses?", "Where is the manual?")),
        ("When do the library and my gym close?", ("When does the library close?", "When does my gym close?")),
        ("Tell me the code of the gate and the price of a stall.", ("Tell me the code of the gate?",
                                                                   "Tell me the price of a stall?")),
        ("Who sells bread and butter?", ("Who sells bread and butter?",)),
        ("What did Anna and Ben order?", ("What did Anna and Ben order?",)),
        ("When does the ferry leave and how much does it cost?", ("When does the ferry leave?",
                                                                "How much does the ferry cost?")),
    ],
)  # fmt: skip
def test_a_question_is_cut_where_it_asks_for_something_else_and_there_alone(
    message: str, parts: tuple[str, ...]
) -> None:
    assert parts_of(message) == parts


def test_what_stands_before_a_question_is_not_asked() -> None:
    assert asked("The alarm code is 4411.\nWhat is the alarm code?") == (
        "The alarm code is 4411.",
        "What is the alarm code?",
    )
    assert asked("Hello there") == ("", "Hello there")


def test_a_long_message_is_read_whole_and_its_question_wherever_it_stands() -> None:
    rain = "We have had rain for weeks. " * 60
    said, letter = "The rent is 640 crowns.", f"Dear Ann. {rain} How are you? {rain}"
    question = "What is the rent?"
    for message in (f"{question}\n{said} {letter}", f"{said} {letter}\n{question}"):
        beside, found = asked(message)
        assert question in found and said in beside and parts_of(message)[-1] == question
    beside, found = asked(f"{letter} {said} Tell me the rent.")
    assert found.endswith("Tell me the rent.") and len(found) <= MAX_CHARACTERS and "Dear Ann" in beside
    assert len(asked("?" * 5000)[1]) == MAX_CHARACTERS


@pytest.mark.parametrize("message", ["", " ", "?", "and and?", "\n\n", "?" * 500, "and what " * 300])
def test_any_message_has_at_least_one_part_and_at_most_three(message: str) -> None:
    assert 1 <= len(parts_of(message)) <= 3


OWN: dict[str | None, tuple[str, ...]] = {
    ABILITIES: (
        "Hello",
        "-p hi",
        "Hi there, how are you?",
        "Guten Tag!",
        "ok, thanks",
        "what can you do?",
        "help",
        "How can you help me with my documents?",
    ),
    CANNOT: (
        "Summarise the lease.",
        "Could you translate this?",
        "Give me a summary of the lease",
        "Can you write an e-mail to my landlord?",
        "Write some python code",
    ),
    None: (
        "Hello, when does the library open?",
        "Thanks to whom was it built?",
        "",
        "Give me the title of the book about the history of the town.",
        "Who wrote the summary?",
        "What can dogs do on board?",
        "Write down the code.",
        "Give me the code of the garage.",
        "Give me the garage code",
        "Provide our caretaker's email",
        "How do I use the washing machine?",
        "What do I do if the fire alarm goes off?",
        "What documents do I need for the visa?",
        "Who are your neighbours?",
        "a" * 5000,
    ),
}


@pytest.mark.parametrize(("message", "said"), [(message, said) for said, some in OWN.items() for message in some])
def test_a_greeting_and_a_wish_that_it_cannot_fulfil_are_answered_so_and_no_question(
    message: str, said: str | None
) -> None:
    assert own_answer(message, "") == (None if said is None else (f"{said}.", {"answer": f"{said}."}))


def test_what_it_can_is_told_with_questions_that_work() -> None:
    for sample in json.loads((SAMPLES / "questions.json").read_text("utf-8")):
        assert sample["question"] in ABILITIES


CONVERSATION = "USER: When does the Harbour Library of Tarnwick open?\nASSISTANT: 8:30 in the morning."


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Generate a concise, 3-5 word title summarizing the chat history.", {"title": "Harbour Library of Tarnwick"}),
        ("Generate 1-3 broad tags of the chat history.", {"tags": ["harbour", "library", "of", "tarnwick"]}),
        (
            "Determine if a search is needed, and generate search queries for the chat.",
            {"queries": ["When does the Harbour Library of Tarnwick open?"]},
        ),
    ],
)
def test_what_a_front_end_asks_of_a_conversation_has_something_of_it(task: str, said: dict[str, object]) -> None:
    (name,) = said
    wish = f'### Task:\n{task}\n### Output:\nJSON format: {{ "{name}": ... }}'
    prompt = f"{wish}\n<chat_history>\n{CONVERSATION}\n</chat_history>"
    own = own_answer(prompt, "")
    assert own is not None and json.loads(own[0]) == said


def test_a_title_may_be_asked_for_in_words_and_of_what_was_said_before() -> None:
    prompt = f"Provide a concise, 5-word-or-less title for the conversation.\n\nConversation:\n{CONVERSATION}"
    own = own_answer(prompt, "")
    assert own is not None and own[0] == "Harbour Library of Tarnwick"
    own = own_answer("Create a short title for this conversation.", "What is the password for our wifi?")
    assert own is not None and own[0] == "Password wifi"


def test_follow_ups_are_questions_about_the_same() -> None:
    task = "Suggest 3-5 relevant follow-up questions that the user might ask next in this conversation."
    own = own_answer(f'{task}\n{{ "follow_ups": [] }}\n<chat_history>\n{CONVERSATION}\n</chat_history>', "")
    assert own is not None
    found = json.loads(own[0])["follow_ups"]
    assert len(found) == 3 and all("Harbour Library of Tarnwick" in each for each in found)


FOREIGN = "Wann öffnet die Bibliothek?", "Quand ouvre la bibliothèque ?", "¿Cuándo abre?", "図書館はいつ開きますか"


@pytest.mark.parametrize("message", [*FOREIGN, "Where is Le Monde?", "wifi password?", "Who is Jürgen Weiß?", ""])
def test_another_language_is_told_by_its_small_words_or_letters_and_names_make_none(message: str) -> None:
    assert is_foreign(message) is (message in FOREIGN)
