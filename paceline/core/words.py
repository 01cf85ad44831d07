"""The words of a text in one spelling, so that they can be compared.

Texts are folded as Unicode's NFKC_Casefold does it: compatible characters (ligatures, full-width forms), case, and
characters that are not seen (soft hyphens, zero-width ones) make no difference. Scripts that set no blanks give single
characters and pairs of them. A number or a part number has many spellings, that give a word in common.
Not handled: inflection, accents, and which of two dates 3/4/2024 is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final
from unicodedata import normalize

# Of scripts that set no blanks: Thai, Lao, Burmese, Khmer, Hangul (whose words have endings), Kana, Han.
_SPACELESS: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3041-\u3096\u30a1-\u30fa\u30fc-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua9e0-\ua9ff\uaa60-\uaa7f\uac00-\ud7a3\U00020000-\U0003ffff"
)
# Not letters to Python: combining marks, vowel signs of India.
_MARKS: Final = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0711-\u074a"
    "\u0900-\u0963\u0966-\u096f\u0980-\u0dff\u0f71-\u0f84"
)
_UNSEEN: Final = (  # what Unicode lets be ignored: soft hyphens, joiners, directions, variants
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\U000e0000-\U000e0fff"
)
_CHARACTER: Final = rf"[\w{_MARKS}]"
_LETTER: Final = rf"(?:[^\W\d]|[{_MARKS}])"
_LINE_END: Final = r"[ \t]*+\r?\n\s*+"
_JOINT: Final = rf"(?:-(?:{_LINE_END})?+|(?<=\d)[.,:/'\u2013\u2019](?={_CHARACTER})|[./:](?=\d))"

_IGNORED: Final = re.compile(f"[{_UNSEEN}]+")
_BLANKS: Final = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
_SOFT_BREAK: Final = re.compile(rf"\u00ad{_LINE_END}")
_HYPHENS: Final = str.maketrans(dict.fromkeys("\u2010\u2011\u2212", "-"))
_RUN: Final = re.compile(f"[{_SPACELESS}]+")
_WORD: Final = re.compile(rf"{_CHARACTER}+")
# Possessive, so that the time is linear in the text.
_CHAIN: Final = re.compile(rf"{_CHARACTER}++(?:{_JOINT}{_CHARACTER}++)*+")
_BROKEN: Final = re.compile(rf"({_CHARACTER}++)-{_LINE_END}(?=({_CHARACTER}++))")
_PIECE: Final = re.compile(rf"\d++|{_LETTER}++")
_DECIMAL: Final = re.compile(r"\d++(?:[.,:]\d++)++")
_THOUSANDS: Final = re.compile(r"(\d{1,3}+(?:[.,'\u2019]\d{3})++)(?:[.,]\d++)?")
_STRETCH: Final = re.compile(r"\d[\d ().,/'\u2019-]*+")
_SPACED: Final = re.compile(r"\d++(?:(?:[ ()]{1,3}|[-.,/'\u2019])\d++)*+")
_PREFIX: Final = re.compile(rf"(?<!{_CHARACTER}){_LETTER}{{1,4}}$")
_GAP: Final = re.compile(r"[ ()]+")
_MONTH_NAMES: Final = (
    "january jan januar|february feb februar|march mar märz|april apr|may mai|june jun juni|july jul juli|august aug|"
    "september sep sept|october oct oktober okt|november nov|december dec dezember dez"
)
_MONTHS: Final = {
    name: number for number, names in enumerate(_MONTH_NAMES.split("|"), start=1) for name in names.split()
}
_DATE: Final = re.compile(r"(\d{4})[-./](\d{1,2})[-./](\d{1,2})|(\d{1,2})[-./](\d{1,2})[-./](\d{4})")
_DAY: Final = re.compile(r"(\d{1,2})(?:st|nd|rd|th)?")
_YEAR: Final = re.compile(r"\d{4}")

_MAX_CHAIN: Final = 80  # characters: longer ones are no names of anything
_MAX_GROUPS: Final = 8  # of digits with blanks between: more are a row of a table
_FEW_DIGITS: Final = 5  # below, 2.14 and 214 are not the same
_SUBSCRIBER: Final = 7  # last digits of a telephone number, whatever stands before them
_LONG: Final = re.compile(r"\d{9,15}")  # may be a telephone number


def folded(text: str) -> str:
    """A text as it is compared: see above."""
    if text.isascii():
        return text.lower()
    return normalize("NFKC", _IGNORED.sub("", normalize("NFKC", text).casefold()))


def seen(text: str) -> str:
    """The text as it is seen: letters with their accents as one character, plain blanks, and nothing in between."""
    return text if text.isascii() else _BLANKS.sub(" ", normalize("NFC", _IGNORED.sub("", text)))


class Words:
    """The words of a text."""

    def __init__(self, text: str) -> None:
        self._runs: list[str] = []  # of scripts without blanks
        if not text.isascii():
            text = folded(_SOFT_BREAK.sub("-\n", text)).translate(_HYPHENS)
            self._runs = _RUN.findall(text)
            text = _RUN.sub(" ", text)
        self._rest = folded(text).replace("_", "-")
        self._chains = _CHAIN.findall(self._rest)
        self._odd = [i for i, chain in enumerate(self._chains) if not chain.isalpha()]  # more than one word each

    def words(self) -> list[str]:
        """In order; of scripts without blanks the pairs of characters, behind all others."""
        words: list[str] = []
        for chain in self._chains:
            if chain.isalpha():
                words.append(chain)
            else:
                words += _WORD.findall(chain)
        return words + self.pairs()

    def pairs(self) -> list[str]:
        """Words of scripts without blanks: characters and pairs of them."""
        return [pair for run in self._runs for pair in (map("".join, pairwise(run)) if len(run) > 1 else run)]

    def parts(self) -> Iterator[str]:
        """Further words by which the text is found: what a hyphen joins or a line's end divides, the pieces of 5mg, all
        forms of numbers, single characters of scripts without blanks."""
        for i in self._odd:
            yield from _forms(self._chains[i])
        for forms in (*self._spaced(), *self._dates()):
            yield from forms
        for run in self._runs:
            if len(run) > 1:
                yield from run

    def numbers(self) -> list[tuple[str, ...]]:
        """The numbers, dates, and names with digits: of each the words that it gives, those that tell most first."""
        found = []
        for i in self._odd:
            words = sorted(_WORD.findall(self._chains[i]), key=len, reverse=True)
            forms = [*(words if len(words) == 1 else ()), *_forms(self._chains[i]), *words]
            if i and forms[0][0].isdigit() and self._chains[i - 1].isalpha():
                forms.insert(0, self._chains[i - 1] + forms[0])  # PPR 1148 for PPR-1148
            found.append(tuple(filter(_has_digit, dict.fromkeys(forms))))
        dates = (forms[:1] for forms in self._dates())  # the day in another year is another date
        return [forms for forms in dict.fromkeys([*found, *self._spaced(), *dates]) if forms]

    def _spaced(self) -> Iterator[tuple[str, ...]]:
        """Numbers with blanks in them."""
        for match in _STRETCH.finditer(self._rest) if self._odd else ():
            yield from _spaced(match[0], _PREFIX.search(self._rest, max(0, match.start() - 5), match.start()))

    def _dates(self) -> Iterator[tuple[str, ...]]:
        """Dates with their year, where they have one, and without."""
        for i in self._odd:
            if date := _DATE.fullmatch(self._chains[i]):
                year, month, day = date.group(1, 2, 3) if date[1] else date.group(6, 5, 4)
                yield from _date(year, int(month), int(day))
            elif day := _DAY.fullmatch(self._chains[i]):
                near = [self._chains[j] if 0 <= j < len(self._chains) else "" for j in range(i - 1, i + 4)]
                if near[2] == "of":
                    del near[2]
                month, year = (near[2], near[3]) if near[2] in _MONTHS else (near[0], near[2])
                if month in _MONTHS:
                    yield from _date(year if _YEAR.fullmatch(year) else "", _MONTHS[month], int(day[1]))


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))


def _forms(chain: str) -> list[str]:
    """Further words of those that hyphens, points and the like join, or letters and digits; the whole first."""
    if len(chain) > _MAX_CHAIN:
        return []
    words = _WORD.findall(chain)
    pieces = sorted(_PIECE.findall(chain), key=len, reverse=True)
    broken = map("".join, _BROKEN.findall(chain))
    whole = "".join(words)
    told = [] if whole.isdigit() and len(whole) < _FEW_DIGITS else [whole]
    forms = dict.fromkeys([*told, *broken, *_spellings(chain), *pieces])
    return [form for form in forms if form not in words]


def _spellings(chain: str) -> Iterator[str]:
    """Spellings of the number in a chain, from its first digit on."""
    digits = "".join(filter(str.isdigit, chain))
    if not digits:
        return
    core = chain[chain.index(digits[0]) :]
    if chain.startswith("0x"):
        yield chain[2:]
    if len(digits) >= _FEW_DIGITS:
        yield "".join(_WORD.findall(core))
    if thousands := _THOUSANDS.fullmatch(core):
        yield "".join(filter(str.isdigit, thousands[1]))
    elif _DECIMAL.fullmatch(core):  # a version by its beginning, and 8.30 as 8:30
        groups = _PIECE.findall(core)
        for end in range(len(groups), 1, -1):
            yield ".".join(groups[:end])
    if _LONG.fullmatch(digits):
        yield digits[-_SUBSCRIBER:]


def _spaced(stretch: str, prefix: re.Match[str] | None) -> Iterator[tuple[str, ...]]:
    """Spellings of digits with blanks between, and the letters before them."""
    for match in _SPACED.finditer(stretch):
        groups = ["".join(_WORD.findall(group)) for group in _GAP.split(match[0])]
        if prefix and not match.start():
            groups[0] = prefix[0] + groups[0]
        if 1 < len(groups) <= _MAX_GROUPS:
            ends = ["".join(groups[i:]) for i in range(len(groups) - 1)]
            others = [(i, j) for i in range(len(groups)) for j in range(i + 2, len(groups))]
            joined = sorted(("".join(groups[i:j]) for i, j in others), key=len, reverse=True)
            tails = (form[-_SUBSCRIBER:] for form in (*ends, *joined) if _LONG.fullmatch(form))
            # Other numbers of the same area begin alike: the ends tell more than what stands before them.
            forms = [*(form for form in ends if len(form) >= _FEW_DIGITS), *tails]
            yield tuple(dict.fromkeys([*forms, *(form for form in joined if len(form) >= _FEW_DIGITS)]))


def _date(year: str, month: int, day: int) -> Iterator[tuple[str, ...]]:
    if month > 12:
        month, day = day, month
    if 1 <= month <= 12 and 1 <= day <= 31:
        name = f"{month:02}-{day:02}"
        yield (f"{year}-{name}", name) if year else (name,)
