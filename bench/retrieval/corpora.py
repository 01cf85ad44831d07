"""Data of `perplexity`: test windows with two corpora, and training text of its language models.

No test article is in a model's training text or in the fit of its weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError

from .articles import Ids, Shelves, encyclopaedia, other_prose, shelve, shelve_entries, wikitext

Encode = Callable[[str], Sequence[int]]

SEED: Final = 20
MIN_ARTICLES: Final = 6  # for a split in three


@dataclass(frozen=True, slots=True)
class Material:
    """`reading`: training text of models. `lessons`: text to fit the weights of copying. `test`: measured."""

    name: str
    reading: tuple[Ids, ...]
    lessons: Shelves
    test: Shelves


def gather(data: Path | None, encode: Encode, *, window: int, passage: int, tested: int | None = None) -> Material:
    """WikiText-2 of the data folder, or the encyclopaedia without a folder. Split with a fixed seed.

    window, passage: tokens. tested: maximum number of test articles; None: half of all. Raises ConfigError if the
    folder has too few articles.
    """
    if data is None:
        return _generated(encode, window, passage, tested or 30)
    return _wikitext(data, encode, window, passage, tested)


def _wikitext(data: Path, encode: Encode, window: int, passage: int, tested: int | None) -> Material:
    articles = wikitext(data)
    if len(articles) < MIN_ARTICLES:
        raise ConfigError(f"{data}/wikitext2 has {len(articles)} articles; at least {MIN_ARTICLES} are needed")
    random.Random(SEED).shuffle(articles)
    half, tenth = len(articles) // 2, max(1, len(articles) // 10)
    ids = [tuple(encode(article.text)) for article in articles]
    test, lessons, reading = ids[:half][:tested], ids[half : half + tenth], ids[half + tenth :]
    prose = [tuple(encode(article.text)) for article in other_prose(data)]
    shelves = [shelve(each, window=window, passage=passage) for each in (lessons, test)]
    return Material("WikiText-2", (*reading, *prose), *shelves)


def _generated(encode: Encode, window: int, passage: int, tested: int) -> Material:
    """The encyclopaedia. Names and values of the test are from the held-out tenth."""
    read = list(encyclopaedia(random.Random(SEED), "train", 200))
    texts = [entry.retelling for entry in read] + [text for entry in read for _, text in entry.facts]
    shelves = [
        shelve_entries(encyclopaedia(random.Random(SEED + 1), "train", 12), encode, window=window, passage=passage),
        shelve_entries(
            encyclopaedia(random.Random(SEED + 2), "held_out", tested), encode, window=window, passage=passage
        ),
    ]
    return Material("generated encyclopaedia", tuple(tuple(encode(text + "\n")) for text in texts), *shelves)
