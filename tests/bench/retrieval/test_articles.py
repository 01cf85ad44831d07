"""Corpora and test text: disjointness, undone tokenisation of WikiText, and facts split between the sides."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bench.retrieval.articles import Shelves, parse_wikitext, printed, shelve
from bench.retrieval.corpora import gather

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
