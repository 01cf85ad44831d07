"""Words of English and German that name nobody, for `core.redaction`; of other languages nothing is known.

`lexicon.txt` has them. Endings are taken off before a word is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Final


def _read() -> Mapping[str, frozenset[str]]:
    """The words of each section of the file."""
    found: dict[str, frozenset[str]] = {}
    text = (resources.files(__package__) / "lexicon.txt").read_text("utf-8")
    for section in text.split("\n[")[1:]:
        name, _, words = section.partition("]")
        found[name] = frozenset(words.partition("\n")[2].split())
    return found


_WORDS: Final = _read()
DETERMINERS, CAPITALISED = _WORDS["determiners"], _WORDS["capitalised"]
TITLES, NAMERS, LEGAL, GIVEN = _WORDS["titles"], _WORDS["namers"], _WORDS["legal"], _WORDS["given"]
GERMAN, ENGLISH = _WORDS["signs of german"], _WORDS["signs of english"]
SAYS, LINKS, PLACES = _WORDS["says"], _WORDS["links"], _WORDS["places"]
HEADS, FIRMS = _WORDS["heads"], _WORDS["firms"]
_ENGLISH, _GERMAN, _OF_NAMES = _WORDS["english"], _WORDS["german"] | DETERMINERS, _WORDS["endings"]
_GERMAN_NOUN: Final = re.compile(
    r".{3,}(?:ung|ungen|heit|heiten|keit|keiten|schaft|schaften|tion|tionen|tät|täten|ismus|nis|nisse|tum|ment|mente"
    r"|chen|lein|ling|linge|enz|anz|ität|eur|tik|tiken|hnik|hniken|ieren|logie|phie|itis|erie|igung)s?"
)
_ENGLISH_WORD: Final = re.compile(
    r".{3,}(?:tion|ment|ness|ity|ism|logy|graphy|ence|ance|able|ible|ful|less|ous|ive|ical|ing|ings|tions|ments|ly"
    r"|ship|hood|ware|ology)s?"
)
_ENDINGS: Final = ("'s", "’s", "innen", "ern", "est", "ing", "en", "er", "es", "em", "ed", "ly", *"nesdr")
_PLURALS: Final = ("en", "n", "e", "s", "es")
_LONGEST: Final = 60  # letters of a word
_HEAD: Final = 4  # letters of a noun at the end of a compound


def is_listed(word: str, *, german: bool) -> bool:
    """The word, in lower case, is a common one of its language as it stands."""
    return word in (_GERMAN if german else _ENGLISH)


def is_common(word: str, *, german: bool) -> bool:
    """Likewise, or without an ending."""
    known = _GERMAN if german else _ENGLISH
    if word in known or word in CAPITALISED:
        return True
    stems = (word[: -len(ending)] for ending in _ENDINGS if word.endswith(ending))
    return any(len(stem) > 2 and not known.isdisjoint(_listings(stem)) for stem in stems)


def is_common_shape(word: str, *, german: bool) -> bool:
    """Its end tells that the word, in lower case, is a noun or an adverb of its language, though it is not listed."""
    if len(word) > _LONGEST:
        return False
    if not german:
        return _ENGLISH_WORD.fullmatch(word) is not None
    if _GERMAN_NOUN.fullmatch(word):
        return True
    first, part = 0, word.rpartition("-")[2]  # of a compound, the last noun tells what it is
    if part == word:
        first = 3
    tails = (part[at:] for at in range(first, len(part) - _HEAD + 1))
    return any(
        tail not in _OF_NAMES and (tail in _GERMAN or any(tail.removesuffix(each) in _GERMAN for each in _PLURALS))
        for tail in tails
    )


def _listings(stem: str) -> tuple[str, ...]:
    """How a stem may be listed: "mak" for make, "plann" for plan, "häus" for Haus."""
    plain = stem.replace("ä", "a").replace("ö", "o").replace("ü", "u")
    return stem, f"{stem}e", stem[:-1] if stem[-1] == stem[-2] else stem, plain, f"{plain}e", f"{stem[:-1]}y"
