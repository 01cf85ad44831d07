"""The policy: which documents a pattern names, and that a decision is the strictest of all, with its reason."""

from __future__ import annotations

from itertools import combinations, product
from typing import Literal
from unicodedata import normalize

import pytest

from paceline.core.policy import (
    HIGHEST,
    PRIVACY_LEVELS,
    Cause,
    Decision,
    DocumentFacts,
    DocumentRule,
    Grant,
    Pattern,
    Policy,
    Privacy,
    causes_of,
    letters,
    strictest,
    used_up,
)
from paceline.core.side import SIDES, Side

HOME = "/home/ann"


@pytest.mark.parametrize(
    ("pattern", "named", "others"),
    [
        ("~/diary", ["/home/ann/diary", "/home/ann/diary/2024/may.md"], ["/home/ann/diary.md", "/home/bob/diary/x"]),
        ("~/diary/**", ["/home/ann/diary/2024/may.md"], ["/home/ann/notes/x"]),
        ("/srv/*/secret", ["/srv/a/secret/x.md", "/SRV/b/Secret"], ["/srv/a/b/secret/x.md", "/tmp/srv/a/secret"]),
        ("/srv/**/secret", ["/srv/secret/x", "/srv/a/b/secret/x.md"], ["/srv/a/b/secrets"]),
        ("*.tax.md", ["/home/ann/2024.tax.md", "a.tax.md", "notes/B.TAX.MD"], ["/home/ann/tax.md", "a.tax.mdx"]),
        ("diary", ["/home/ann/diary/x.md", "diary/x.md", "diary"], ["/home/ann/mydiary/x.md"]),
        ("notes/diary", ["/home/ann/notes/diary/x.md", "notes/diary"], ["/home/ann/diary/notes"]),
        ("café", ["/home/ann/cafe\u0301/x.md", "CAFÉ"], ["cafe"]),
        ("[!a]*.md", ["b.md"], ["a.md"]),
        ("a[.]b", ["a.b"], ["axb"]),
        ("line", ["line"], ["line\nx"]),
    ],
)
def test_a_pattern_names_files_and_folders_in_any_case(pattern: str, named: list[str], others: list[str]) -> None:
    parsed = Pattern.parse(pattern, HOME)
    assert [path for path in named if not parsed.matches(DocumentFacts((path,)))] == []
    assert [path for path in others if parsed.matches(DocumentFacts((path,)))] == []


def test_a_pattern_names_a_store_and_a_tag_and_no_path_that_looks_like_one() -> None:
    document = DocumentFacts(("/a/b.md", "b.md"), ("Medical", "vs_1"), {"class": "private", "year": 2024})
    for text in ("store:medical", "store:vs_1", "store:med*", "tag:class=private", "tag:class=*", "tag:year=2024"):
        assert Pattern.parse(text, HOME).matches(document), text
    disguised = DocumentFacts(("/a/store:medical", "tag:class=private"))
    for text in ("store:medical", "tag:class=private", "tag:class=public"):
        assert not Pattern.parse(text, HOME).matches(disguised), text


@pytest.mark.parametrize("text", ["", "/", "**", "*", "/**", "a[b", "store:", "tag:", "tag:class", "tag:=x", "a[z-b]"])
def test_a_pattern_that_names_everything_or_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names|pattern|without"):
        Pattern.parse(text, HOME)


STRANGE = [
    "./a",
    "../a/b",
    "a/../b",
    "a/.",
    "a//b",
    "$HOME/a",
    "~root/a",
    " /a",
    "/a ",
    "file:///a",
    "stores:a",
    "store:a ",
]


@pytest.mark.parametrize("text", STRANGE)
def test_a_pattern_that_no_document_can_have_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="can name no document"):
        Pattern.parse(text, HOME)


RULES = [DocumentRule(rule, Pattern.parse(f"{rule}.md", HOME)) for rule in HIGHEST]


@pytest.mark.parametrize(("side", "asked"), [*product(SIDES, PRIVACY_LEVELS)])
def test_a_decision_is_the_strictest_of_what_is_asked_and_of_all_rules_and_names_one_that_says_so(
    side: Side, asked: Privacy
) -> None:
    for number in range(len(RULES) + 1):
        for rules in combinations(RULES, number):
            decided = Decision(asked).narrowed(causes_of(rules), side, holds=True)
            levels: list[Privacy] = [HIGHEST[each.rule] for each in rules]
            if side == "cloud":  # what a cloud has read it cannot keep from itself
                levels = ["local-only" if level == "answer-private" else level for level in levels]
            assert decided.level == strictest(asked, *levels)
            assert decided.holds == strictest("open", *levels), "whatever was asked"
            told = [str(each) for each, level in zip(rules, levels, strict=True) if level == decided.level != "open"]
            assert decided.rule in (told or [""]) and bool(decided.rule) == bool(told)
            again = decided.narrowed(causes_of(rules), side, holds=True)
            assert again == decided, "and stays so"
            assert decided.narrowed([Cause("open", "x"), Cause("document-private", "y")], side).level == strictest(
                decided.level, "document-private"
            )


def test_grants_are_of_the_named_key_else_of_all_others_and_of_the_model() -> None:
    reads = (Pattern.parse("public", HOME),)
    phone, others, model = Grant("key phone", reads), Grant("all", (), ("small",), "local-only"), Grant("model m", ())
    policy = Policy(keys={"phone": phone, "*": others}, models={"m": model})
    assert policy.grants("phone", "x") == (phone,)
    assert policy.grants("tablet", "m") == (others, model) and policy.grants("", "x") == (others,)
    assert policy.grants(None, "x") == (), "who needs no key is the owner"
    assert phone.may_read(DocumentFacts(("/a/public/x.md",))) and not phone.may_read(DocumentFacts(("/a/x.md",)))
    assert Grant("any").may_read(DocumentFacts(())) and not others.may_read(DocumentFacts(("public",)))


def test_a_budget_is_used_up_when_nothing_of_it_is_left() -> None:
    budgets = {"joules": 5.0, "bytes": 10.0, "cloud_tokens": 0.0}
    assert used_up(budgets, {"joules": 4.9, "bytes": 10.0}) == ["bytes", "cloud_tokens"]  # type: ignore[arg-type]
    assert not Policy() and Policy(budgets={"bytes": 1.0})


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_letters_are_those_of_any_form_of_a_text_in_any_division(form: Literal["NFC", "NFD", "NFKC", "NFKD"]) -> None:
    text = "Café Ångström, ﬁve GRÜßE: 한국 ２０"
    written = normalize(form, text)
    assert letters(written) == letters(text) == "cafeangstromfivegrusse" + normalize("NFKD", "한국") + "20"
    assert all(letters(written[:cut]) + letters(written[cut:]) == letters(text) for cut in range(len(written)))
