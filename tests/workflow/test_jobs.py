"""Jobs over many passages: a reply counts only as far as it stands in its passage, and who disagrees is asked again."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.workflow.jobs import (
    AGAIN,
    BEARING,
    ROUNDS,
    SUMMARISED,
    Replies,
    agree,
    asks_summary,
    bearings,
    named_in,
    parts_of_texts,
    span_of,
    summary_of,
)
from paceline.workflow.reading import words_apart

PASSAGE = "Revenue of the mill rose to $42.5 million in 2021, said Orla Venn, who led it since 2014.\nIt sells Flour."
QUESTION = "What was the revenue of the mill in 2021?"
WORDS = ("mill", "flour", "42", "the", "of", "Orla", "NONE", "2021", "sold", "磨", "坊", "7")
texts = st.lists(st.sampled_from(WORDS), max_size=12)


@pytest.mark.parametrize(
    ("reply", "span"),
    [
        ("$42.5 million", "42 5 million"),
        ("42.5 Million.", "42 5 million"),
        ("Answer: $42.5 million", "42 5 million"),
        ("The revenue of the mill in 2021 was $42.5 million.", "42 5 million"),
        ("$43.5 million", ""),  # another figure
        ("$42.5 million in 2019", ""),  # a figure that stands nowhere, beside one that does
        ("NONE", ""),
        ("The text does not say.", ""),
        ("in 2021", ""),  # nothing that the question does not say
        ("I cannot tell you what it was, ask somebody else about flour", ""),  # it adds more than stands there
        ("", ""),
        ("said  ORLA\nvenn", "said orla venn"),
    ],
)
def test_of_a_reply_counts_what_stands_in_the_passage(reply: str, span: str) -> None:
    assert span_of(reply, PASSAGE, QUESTION) == span


def test_words_of_a_script_without_blanks_are_its_characters() -> None:
    assert span_of("四十二", "磨坊的收入为四十二百万。", "收入是多少?") == "四 十 二"
    assert span_of("九千", "磨坊的收入为四十二百万。", "收入是多少?") == ""


@given(texts, texts, texts)
def test_a_span_is_a_run_of_words_of_both(reply: list[str], passage: list[str], asked: list[str]) -> None:
    said, read = " ".join(reply), " ".join(passage)
    span = span_of(said, read, " ".join(asked))
    for text in (said, read):
        assert f" {span} " in f" {' '.join(words_apart(text))} " or not span
    assert agree(span, span)


def heard(replies: Replies, *rounds: Mapping[int, str]) -> list[list[int]]:
    return [replies.hear(spans) for spans in rounds]


def test_where_replies_agree_nothing_is_read_again_and_one_of_each_answer_comes_first() -> None:
    replies = Replies([1.0] * 5)
    assert heard(replies, {3: "42 million", 1: "", 2: "about 42 million", 4: "", 0: ""}) == [[]]
    assert replies.order() == [2, 3, 0, 1, 4] and replies.found == 2


def test_where_they_disagree_those_passages_are_read_again_and_what_is_not_said_again_is_dropped() -> None:
    replies = Replies([1.0] * 4)
    again = heard(
        replies, {0: "41 million", 1: "", 2: "42 million", 3: "42 million"}, {0: "", 2: "42 million", 3: "42"}
    )
    assert again == [[0, 2, 3], []]
    assert replies.order() == [2, 3, 0, 1]


def test_what_still_disagrees_after_the_last_round_is_read_by_the_answer_each_answer_first() -> None:
    spans = {0: "red", 1: "blue", 2: "red"}
    replies = Replies([1.0] * 4)
    assert heard(replies, *[spans] * (ROUNDS + 1)) == [[0, 1, 2]] * ROUNDS + [[]]
    assert replies.order() == [0, 1, 2, 3]


def test_what_a_passage_holds_of_a_question_does_not_depend_on_the_order_of_a_set() -> None:
    asked = "alpha bravo charlie delta echo foxtrot golf hotel"
    passages = [" ".join(words) for words in itertools.combinations(asked.split(), 3)]
    code = f"from paceline.workflow.jobs import bearings; print(bearings({asked!r}, {passages[::5]!r}))"
    said = [
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] != b""


def test_a_reply_from_a_passage_with_little_of_the_question_counts_for_nothing_beside_a_better_one() -> None:
    asked = "What was the turnover of the Kelmor plant in 2021?"
    passages = [f"Turnover of the {town} plant was {turnover} in 2021." for town, turnover in TURNOVERS.items()]
    found = bearings(asked, passages)
    assert max(found) == found[2] == 1.0 and max(found[:2] + found[3:]) < BEARING
    replies = Replies(found)
    assert replies.hear(dict(enumerate(TURNOVERS.values()))) == [] and replies.order()[0] == 2 and replies.found == 1
    assert bearings("Where is it?", passages) == [1.0] * len(passages), "nothing tells one from another"
    unsure = Replies(found)
    unsure.hear({0: "11.5", 2: ""})
    assert unsure.order()[0] == 0 and unsure.found == 1, "there is no better one"


TURNOVERS = {"Arwick": "11.5", "Belmor": "20.1", "Kelmor": "35.9", "Kelmoor": "42.2"}


def test_where_every_reply_changes_what_was_said_before_stays() -> None:
    replies = Replies([1.0] * 2)
    assert heard(replies, {0: "red", 1: "blue"}, {0: "green", 1: ""})[0] == [0, 1]
    assert replies.order() == [0, 1] and replies.found == 2


@given(st.lists(st.sampled_from(["", "red", "blue", "red sea"]), min_size=1, max_size=20), st.randoms())
def test_rounds_end_and_every_passage_has_one_place(spans: list[str], chance: object) -> None:
    replies, asked = Replies([1.0] * len(spans)), list(range(len(spans)))
    for round_ in range(ROUNDS + 2):
        again = replies.hear({place: chance.choice([spans[place], ""]) for place in asked})  # type: ignore[attr-defined]
        if not again:
            break
        assert round_ < ROUNDS and len(again) <= AGAIN and set(again) <= set(range(len(spans)))
        asked = again
    assert sorted(replies.order()) == list(range(len(spans))) and not again


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 900)), max_size=60), st.integers(1, 12))
def test_parts_follow_each_other_in_one_document_and_are_no_more_than_may_be(
    sizes: list[tuple[str, int]], most: int
) -> None:
    parts = parts_of_texts(sizes, most)
    places = [place for part in parts for place in part]
    assert places == sorted(set(places)) and len(parts) <= most
    for part in parts:
        held = [sizes[place] for place in part]
        assert len({document for document, _ in held}) == 1
        assert len(held) == 1 or sum(size for _, size in held) <= SUMMARISED
    if sum(size for _, size in sizes) <= SUMMARISED and len({document for document, _ in sizes}) == 1:
        assert places == list(range(len(sizes)))


def test_a_summary_has_the_sentences_that_the_text_supports_and_never_a_figure_of_its_own() -> None:
    reply = "- Revenue of the mill rose to $42.5 million.\n- It has 99 workers. The moon is made of green cheese today."
    assert summary_of(reply, PASSAGE) == "Revenue of the mill rose to $42.5 million."
    assert summary_of("No idea.", PASSAGE).startswith("Revenue of the mill rose")


@pytest.mark.parametrize(
    ("question", "is_one"),
    [
        ("Summarise this folder.", True),
        ("Please give me a summary of report.pdf", True),
        ("Fasse diesen Ordner zusammen", True),
        ("Eine Zusammenfassung bitte", True),
        ("What does Summerland cost?", False),
        (QUESTION, False),
    ],
)
def test_a_summary_is_asked_for_in_its_words(question: str, is_one: bool) -> None:
    assert asks_summary(question) == is_one


def test_documents_are_named_by_all_of_their_words() -> None:
    names = {"report.pdf", "annual report 2023.pdf", "a.md", "notes.md"}
    assert named_in("Summarise report.pdf", names) == {"report.pdf"}
    assert named_in("Summarise the Annual Report 2023", names) == {"annual report 2023.pdf"}
    assert named_in("Give me a summary of my notes", names) == set()
