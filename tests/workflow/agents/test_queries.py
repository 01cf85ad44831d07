"""What is searched for: items of lists as models write them, refusals, nonsense and what stands for it."""

from __future__ import annotations

import pytest

from paceline.workflow.agents import Evidence, QueryParser, SourcePassage, look, plan, rewrite
from tests.workflow.agents.texts import MILLS, QUESTION, passage, read

RED, BLUE = "When was the red mill of Aarburg built?", "When was the blue mill of Brill built?"


def rewritten(text: str, question: str = QUESTION) -> QueryParser:
    return read(rewrite(question).parser(), [text])


def planned(text: str, question: str = QUESTION) -> QueryParser:
    return read(plan(question).parser(), [text])


def test_a_sub_question_is_there_as_soon_as_its_line_ends() -> None:
    parser = rewrite(QUESTION).parser()
    assert [parser.feed(piece) for piece in ("1. When was the red mill", " of Aarburg built?", "\n2", ". ")] == [
        [],
        [],
        [RED],
        [],
    ]
    assert parser.feed(BLUE) == [] and not parser.done
    assert parser.end() == [BLUE]
    assert parser.found == [RED, BLUE] and not (parser.fallback or parser.declined)


@pytest.mark.parametrize(
    "text",
    [
        f"{RED}\n{BLUE}",
        f"1. {RED}\n\n2. {BLUE}\n",
        f"(1) {RED}\n(2) {BLUE}",
        f"• {RED}\n– {BLUE}",
        f'"{RED}"\n“{BLUE}”',
        f"Question 1: {RED}\nsub-question 2. {BLUE}",
        f"**Sub-question 1:** {RED}\n**{BLUE}**",
        f"1. Q: - “{RED}”\n2. **Q**: {BLUE}",
        f"Here are the sub-questions:\n{RED}\n{BLUE}\n{RED.upper()}\n - {BLUE[:-1]}  !\n...\n",
        f"1. {RED} 2. {BLUE}",
        f'["{RED}", "{BLUE}"]',
        f'{{"questions": ["{RED}", "{BLUE}"]}}',
        f"<think>\nWhich mill is the user's?\n</think>\n\n{RED}\n{BLUE}",
        f"Which mill is thought of? </think>{RED}\n{BLUE}<think>Is the mill red?",
        f"{'mill ' * 400}\n{RED}\n{BLUE}",
    ],
)
def test_sub_questions_are_found_in_all_manners_of_lists(text: str) -> None:
    result = rewritten(text)
    assert (result.found, result.fallback, result.declined) == ([RED, BLUE], False, False)


@pytest.mark.parametrize(
    "text",
    [
        *("", "\n\n", "...", "- \n- \n", "1.\n2.\n3.", "NONE", "No sub-questions needed.", "?!", "```\n```"),
        "Here are some sub-questions for your question:",
        "zog blarf snee",  # nothing of it was asked
        "mill mill mill mill mill mill mill mill",
        f"<think>{RED}\n{BLUE}",
        "x" * 10_000,
        "What is the mill " * 30,
        "What is it?\nWho was that?",
    ],
)
def test_the_question_itself_stands_for_nonsense(text: str) -> None:
    result = rewritten(text)
    assert (result.found, result.fallback) == ([QUESTION], True)


def test_a_question_is_its_own_fallback_word_for_word() -> None:
    question = "  what?\nreally, [2] \x00 " + "mill " * 800
    assert rewritten("", question).found == [question]


def test_sub_questions_in_scripts_without_blanks() -> None:
    result = rewritten("赤い水車はいつ建てられましたか\n意味不明", "赤い水車と青い水車、どちらが古いですか")
    assert result.found == ["赤い水車はいつ建てられましたか"]


@pytest.mark.parametrize(
    "text",
    [
        "NONE", "None.", "  - NONE\n", '"None"', "**NONE**", "(none)", "[]", "n/a.", "null", "Nothing.",
        "No search is needed.", "no web search is required", "No further searches are necessary.", "No queries needed.",
        "There is no need to search the web.", "No additional information is needed.", "Search: NONE", "1. NONE",
        "NONE - the question can be answered from the documents", "None, because the mill is known.", "No.",
        "Not needed.", "A web search is not needed.", "Keine", "なし", "<think>the mill?</think>NONE",
        "I don't need to search for that.", '{"queries": []}', "none\nred mill",
    ],
)  # fmt: skip
def test_a_plan_may_decline_in_many_ways(text: str) -> None:
    result = planned(text)
    assert (result.found, result.declined, result.fallback) == ([], True, False)


def test_a_plan_of_nonsense_is_a_search_for_the_question() -> None:
    for text in ("", "zog blarf", "!!!", "1. 2. 3."):
        assert planned(text).found == [QUESTION] and planned(text).fallback
    long = "Which mill is older? " * 100
    (query,) = planned("", long).found
    assert len(query) <= 200 and query.startswith("Which mill") and query.endswith("older?")


def test_a_refusal_ends_a_list() -> None:
    result = planned("red mill Aarburg\nNONE\nblue mill Brill\n")
    assert (result.found, result.declined, result.fallback) == (["red mill Aarburg"], True, False)


def test_a_second_look_that_writes_nonsense_asks_for_nothing() -> None:
    inputs = look(QUESTION, tuple(Evidence.of(each) for each in MILLS))
    nonsense, none = read(inputs.parser(), ["zog blarf\n"]), read(inputs.parser(), ["NONE"])
    assert nonsense.fallback and none.declined and not (nonsense.found or nonsense.declined or none.found)
    asked = "Buckinghamshire windmills\nbuilt in 1820\nBrill"
    assert read(inputs.parser(), [asked]).found == ["Buckinghamshire windmills", "built in 1820"]


PRIVATE = passage("The password of the mill is 1234.", "device", private=True)
REFUSED = {
    "a private passage": Evidence.of(PRIVATE),
    "a private page": Evidence.of(passage("The mill.", "web", private=True)),
    "a statement of the web that cites nothing of the private page it read": Evidence.from_reading(
        "The mill.", [], [passage("The mill.", "web", private=True)]
    ),
    "a passage of the device": Evidence.of(passage("The mill.", "device")),
    "a passage of the cloud": Evidence.of(passage("The mill.", "cloud")),
    "a statement that cites the web, whose writer read a private passage": Evidence.from_reading(
        "The mill has a password.", MILLS[:1], [MILLS[0], PRIVATE]
    ),
    "an uncited statement of a private passage": Evidence.from_reading("A password.", [], [PRIVATE]),
    "a statement of nothing": Evidence.from_reading("A mill.", [], []),
    "a mislabelled statement": Evidence("A mill.", (PRIVATE,), False, frozenset({"web"})),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_second_look_refuses_what_is_not_of_the_web(kind: str) -> None:
    for evidence in ([REFUSED[kind]], [Evidence.of(MILLS[0]), REFUSED[kind]]):
        with pytest.raises(ValueError, match="second look"):
            look(QUESTION, tuple(evidence))


def test_a_plan_reads_the_question_only() -> None:
    assert [message["content"] for message in plan("Which\nmill?").messages][1] == "Question: Which mill?"


def test_sources_are_compared_with_all_they_are() -> None:
    """Equal text on two sides is two sources."""
    there, here = SourcePassage("a", "cloud", False), SourcePassage("a", "device", True)
    assert Evidence.from_reading("a", [there, here, there], [there, here]).sources == (there, here)
