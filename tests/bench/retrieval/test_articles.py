"""Corpora and test text: disjointness, undone tokenisation of WikiText, and facts split between the sides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.retrieval.articles import Shelves, encyclopaedia, parse_wikitext, printed, shelve, shelve_entries
from bench.retrieval.corpora import gather
from paceline.errors import ConfigError

WIKITEXT = """
 = First title =

 A sentence ( with 1 @,@ 200 words ) by <unk> , " quoted " .

 = = A heading = =

 It 's the end .

 = Second =

 More .
"""

lengths = st.lists(st.integers(0, 300), min_size=1, max_size=5)


@given(lengths, st.integers(8, 40), st.integers(4, 12))
def test_no_token_of_a_test_window_is_in_a_corpus_and_nothing_is_there_twice(
    sizes: list[int], window: int, passage: int
) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    articles = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    shelves = shelve(articles, window=window, passage=passage)
    tested = [token for each in shelves.windows for token in each.ids]
    stored = [token for each in shelves.pieces for token in each.ids]
    assert not set(tested) & set(stored)
    assert len(set(tested)) == len(tested) and len(set(stored)) == len(stored)
    assert all(set(each.ids) <= set(articles[each.article]) for each in shelves.windows)
    assert all(set(each.ids) <= set(articles[each.article]) for each in shelves.pieces)
    assert all(len(each.ids) == window for each in shelves.windows)
    assert all(passage / 4 <= len(each.ids) <= passage for each in shelves.pieces)


def test_a_third_of_an_article_is_tested_and_the_other_passages_alternate_between_the_sides() -> None:
    shelves = shelve([range(90)], window=10, passage=5)
    assert [each.ids[0] for each in shelves.windows] == [10, 40, 70]
    assert [each.ids[0] for each in shelves.of("device")] == [0, 20, 30, 50, 60, 80]
    assert [each.ids[0] for each in shelves.of("cloud")] == [5, 25, 35, 55, 65, 85]


def test_wikitext_is_read_by_article_as_it_was_printed() -> None:
    first, second = parse_wikitext(WIKITEXT)
    assert first.title == "First title"
    assert first.text.splitlines() == [
        "First title",
        'A sentence (with 1,200 words) by _, "quoted".',
        "A heading",
        "It's the end.",
    ]
    assert second.text == "Second\nMore.\n"
    assert printed("5 – 6 a @-@ b doesn 't") == "5–6 a-b doesn't"


def test_each_side_of_the_encyclopaedia_holds_half_of_an_entrys_facts() -> None:
    for entry in encyclopaedia(random.Random(1), "held_out", 5):
        sides = [side for side, _ in entry.facts]
        assert abs(sides.count("device") - sides.count("cloud")) <= 1
        assert entry.retelling.startswith("This page is about ")
        assert len(set(entry.facts)) == len(entry.facts)


def test_entries_are_cut_at_their_limits() -> None:
    entries = list(encyclopaedia(random.Random(1), "held_out", 2))
    shelves = shelve_entries(entries, lambda text: [ord(c) for c in text], window=50, passage=20)
    assert [len(window.ids) for window in shelves.windows] == [50, 50]
    assert {len(piece.ids) for piece in shelves.pieces} == {20}
    assert len(shelves.pieces) == sum(len(entry.facts) for entry in entries)


def _tokens(shelves: Shelves) -> set[int]:
    parts = [each.ids for each in shelves.windows] + [each.ids for each in shelves.pieces]
    return {token for ids in parts for token in ids}


def test_no_model_reads_test_text(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    articles = "".join(f" = T {number} = \n {chr(97 + number) * 60} \n" for number in range(12))
    (tmp_path / "wikitext2" / "test.txt").write_text(articles)
    material = gather(tmp_path, lambda text: [ord(c) for c in text.split("\n")[1]], window=9, passage=5)
    tested, fitted = _tokens(material.test), _tokens(material.lessons)
    read = {token for text in material.reading for token in text}
    assert len(tested) == 6 and len(fitted) == 1 and len(read) == 5
    assert not tested & fitted and not tested & read and not fitted & read


def test_a_folder_without_wikitext_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wikitext2"):
        gather(tmp_path, lambda _: [], window=9, passage=5)
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "valid.txt").write_text(WIKITEXT)
    with pytest.raises(ConfigError, match="has 2 articles; at least 6"):
        gather(tmp_path, lambda _: [], window=9, passage=5)
