"""Whether what a model wrote has to do with what it read: by the words that both have.

Words are compared by their first letters, so that "mill" is in "mills". In scripts without blanks each character is a
word. Knows no synonyms and no translation: what is put in wholly other words counts as foreign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from paceline.workflow.agents.reading.text import folded_words

STEM: Final = 5  # letters
_UNSPACED: Final = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_SEPARATOR: Final = re.compile(r"(?<=\d)[,.'\u00a0\u202f](?=\d{3}(?!\d))")  # of thousands
_FIGURE: Final = re.compile(r"\d{2,}")  # figures of one digit are as often written in letters
_COMMON: Final = """
a about after also am an and any are as at be because been before being but by can could did do does doing for from had
has have having he her here hers him his how i if in into is it its just me more most my no nor not now of off on one or
other our out over own please s same she should so some such t than that the their them then there these they this those
to too under until up us very was we were what when where which while who whom whose why will with would you your
find list many much name question questions query queries search tell want know write
"""
_STOP_WORDS: Final = frozenset(_COMMON.split())


def terms(text: str) -> set[str]:
    """Stems of the words that say what a text is about."""
    found: set[str] = set()
    for word in folded_words(text):
        if _UNSPACED.search(word):
            found |= set(word)
        elif word not in _STOP_WORDS and (len(word) > 1 or word.isdigit()):
            found.add(word.removesuffix("s")[:STEM])
    return found


def figures(text: str) -> set[str]:
    """Numbers of two digits or more, without separators of thousands."""
    return set(_FIGURE.findall(_SEPARATOR.sub("", text)))


class Vocabulary:
    """The words of what an agent reads."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._terms: set[str] = set()
        self._figures: set[str] = set()
        for text in texts:
            self._terms |= terms(text)
            self._figures |= figures(text)

    def touches(self, text: str) -> bool:
        """Whether at least one word was read. True for every text where nothing was read that could be compared."""
        return not self._terms or bool(terms(text) & self._terms)

    def supports(self, text: str) -> bool:
        """Whether at least half of the words were read, and every figure: small models garble figures first."""
        own = terms(text)
        return bool(own) and 2 * len(own & self._terms) >= len(own) and figures(text) <= self._figures
