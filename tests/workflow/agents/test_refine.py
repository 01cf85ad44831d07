"""Refined statements: their passages, what is not supported by any, and privacy."""

from __future__ import annotations

import pytest

from paceline.workflow.agents import MAX_PASSAGES, Evidence, StatementParser, refine
from tests.workflow.agents.texts import MILLS, QUESTION, passage, read

RED, BLUE = "The red mill was built in 1820.", "The blue mill was built in 1650."
ORIGINAL = [Evidence.of(each) for each in MILLS]


def refined(text: str) -> StatementParser:
    return read(refine(QUESTION, MILLS).parser(), [text])


def cited(result: StatementParser) -> list[tuple[str, list[int]]]:
    assert not result.fallback
    return [(each.text, [MILLS.index(source) + 1 for source in each.sources]) for each in result.found]


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        (f"{RED[:-1]} [1].\n{BLUE} [2]\n", [(RED, [1]), (BLUE, [2])]),
        (f"1. {RED} [1]\n2. {BLUE} 【2】", [(RED, [1]), (BLUE, [2])]),
        (f"- [1] {RED}\n- [source 2] {BLUE}", [(RED, [1]), (BLUE, [2])]),
        (
            f"{RED} [1] {BLUE} [2] Brill lies in Buckinghamshire [3].",
            [(RED, [1]), (BLUE, [2]), (ORIGINAL[2].text, [3])],
        ),
        (f"{RED} [1][2]", [(RED, [1, 2])]),
        (f"{RED} [2, 1, 2]", [(RED, [2, 1])]),
        (f"{RED} [2-9999]", [(RED, [2, 3])]),
        (f"According to [1], {RED}", [(f"According to, {RED}", [1])]),
        (f"{RED} [4] [0]\n{BLUE} [9, 2]", [(RED, []), (BLUE, [2])]),
        (f"{RED}\n{RED.upper()} [1]", [(RED, [])]),
        (f"{RED} (1) [x] [1.5]", [(f"{RED} (1) [x] [1.5]", [])]),
        (f"Statement 1: {RED} [1]", [(RED, [1])]),
        (f"Here are the statements:\n{RED} [1]\nNOTHING\n{BLUE} [2]", [(RED, [1])]),
        (f"{RED} [1]\nThe red mill was built in 1821 [1].\nMy uncle Bob sells yellow bananas [1].", [(RED, [1])]),
    ],
)
def test_statements_carry_the_passages_they_cite(text: str, statements: list[tuple[str, list[int]]]) -> None:
    assert cited(refined(text)) == statements


def test_a_statement_is_there_as_soon_as_its_line_ends() -> None:
    parser = refine(QUESTION, MILLS).parser()
    assert parser.feed(f"{RED} [") == parser.feed("1]") == []
    assert [each.sources for each in parser.feed("\n")] == [MILLS[:1]]


def test_a_text_of_one_passage_has_fewer_statements() -> None:
    inputs = refine(QUESTION, MILLS[:1])
    parser = inputs.parser()
    assert "at most 2 short" in str(inputs.messages) and "at most 4 short" in str(refine(QUESTION, MILLS).messages)
    assert len(parser.feed(f"{RED} [1]\nThe mill was built in 1820 [1].\n")) == 2 and parser.done


@pytest.mark.parametrize(
    ("text", "declined"),
    [
        *(("NOTHING", True), ("Nothing.", True), ("- NONE [1]", True), ("There is no relevant information.", True)),
        *(("The passages do not contain the answer.", True), ("None of the quotes helps.", True)),
        *(("", False), ("zog blarf snee [1]", False), ("[1]\n[2]", False), ("?", False), ("It is so. [1]", False)),
        *(("mill mill mill mill mill mill mill [1]", False), ("red mill " * 100, False)),
    ],
)
def test_the_passages_themselves_stand_for_nothing_and_for_nonsense(text: str, declined: bool) -> None:
    result = refined(text)
    assert (result.found, result.fallback, result.declined) == (ORIGINAL, True, declined)


def test_privacy_and_origin_are_those_of_all_that_was_read() -> None:
    """A statement may repeat a passage that it does not cite."""
    private = passage("The red mill of Brill is ours.", "device", private=True)
    for text in (f"{BLUE} [1]\nThe red mill is ours", "NOTHING"):
        inputs = refine(QUESTION, (MILLS[1], private))
        evidence = read(inputs.parser(), [text]).found
        assert len(evidence) == 2
        if text != "NOTHING":
            assert all(each.private and each.origins == {"web", "device"} for each in evidence)
            assert [bool(each.sources) for each in evidence] == [True, False]
        else:
            assert [(each.private, each.origins) for each in evidence] == [(False, {"web"}), (True, {"device"})]


def test_passages_that_were_not_shown_are_not_cited_and_not_lost() -> None:
    passages = tuple(passage(f"The mill {number} is red.", title=str(number)) for number in range(MAX_PASSAGES + 2))
    inputs = refine(QUESTION, passages)
    assert f"[{MAX_PASSAGES}]" in (prompt := str(inputs.messages[1]["content"]))
    assert f"[{MAX_PASSAGES + 1}]" not in prompt
    (statement,) = read(inputs.parser(), [f"The mill is red [{MAX_PASSAGES + 1}]"]).found
    assert not statement.sources
    assert len(read(inputs.parser(), [""]).found) == len(passages)


def test_without_passages_there_is_no_evidence() -> None:
    result = read(refine(QUESTION, ()).parser(), [f"{RED} [1]"])
    assert not result.found and result.fallback
