"""Reading of what agents have written: lines, items, words in their folded form, citations."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from paceline.core.printable import printable_lines
from paceline.core.words import folded as comparable

# Numbers in brackets that name sources: [2], [1, 3], [2-4], [^1], [source 2], and the same in 【】.
#
# Brackets stand on one line.


Range = tuple[int, int]  # first and last number, each at most 4 digits
MAX_CONTENT: Final = 40  # characters within brackets
_WORD: Final = r"(?:(?:sources?|passages?|documents?|docs?|refs?|s|p)\.? ?)?#?"
_NUMBERS: Final = rf"{_WORD}\d{{1,4}}(?: ?[-–] ?\d{{1,4}})?"
_CONTENT: Final = re.compile(rf"\^? ?({_NUMBERS}(?: ?(?:,|;|&|and)? ?{_NUMBERS}){{0,9}}) ?(?:†[^\n]*)?", re.I | re.A)
_RANGE: Final = re.compile(r"(\d{1,4})(?: ?[-–] ?(\d{1,4}))?", re.A)
_BRACKETED: Final = re.compile(rf"[\[【]([^\[\]【】\n]{{1,{MAX_CONTENT}}})[\]】]")
_LIKE_BRACKETED: Final = re.compile(r"[\[［【〔]([^\[\]［］【】〔〕\n]{1,80})[\]］】〕]")


def numbers_within(content: str) -> tuple[Range, ...] | None:
    """The numbers of what stands in brackets; None where it is something else."""
    found = _CONTENT.fullmatch(content)
    if found is None:
        return None
    pairs = [(int(first), int(last or first)) for first, last in _RANGE.findall(found[1])]
    return tuple((min(pair), max(pair)) for pair in pairs)


def find_citations(line: str) -> list[tuple[Range, ...]]:
    """The numbers of each citation of one line."""
    return [ranges for found in _BRACKETED.finditer(line) if (ranges := numbers_within(found[1])) is not None]


def without_citations(line: str) -> str:
    """The line without them, valid or not, and without the blanks they leave."""
    kept = _BRACKETED.sub(lambda found: found[0] if numbers_within(found[1]) is None else " ", line)
    return re.sub(r"(?<!\s)\s++([.,;:!?])", r"\1", " ".join(kept.split()))


def neutralised(line: str) -> str:
    """A line of untrusted text in which what is, or looks like, a citation stands in round brackets."""

    def replaced(found: re.Match[str]) -> str:
        plain = unicodedata.normalize("NFKC", found[1])
        seen = "".join(character for character in plain if unicodedata.category(character) != "Cf")
        return found[0] if numbers_within(" ".join(seen.split())) is None else f"({found[1]})"

    return _LIKE_BRACKETED.sub(replaced, line)


def resolved(ranges: Sequence[Range], count: int) -> list[int]:
    """The numbers from 1 to `count` among these, distinct and in order; others are dropped."""
    numbers = [number for first, last in ranges for number in range(max(first, 1), min(last, count) + 1)]
    return list(dict.fromkeys(numbers))


# One item of a list that a model writes: without its bullet, number, label and quotes.
#
# Models are asked for one item a line. They also write headings, lists in one line, JSON and fences of code.


_BULLET: Final = re.compile(r"[-*•·▪●◦>#+|–—]+(?=\s|$|[\"'“*])\s*")
_NUMBER: Final = re.compile(r"(?:\(\d{1,2}\)|\d{1,2}[.):](?!\d))\s*", re.A)
_LABEL: Final = re.compile(
    r"(?:sub[- ]?)?(?:questions?|q|(?:web |search )?(?:query|queries)|(?:web )?search(?: terms?)?|statements?|answer)"
    r"\s{0,2}#?\d{0,2}\s{0,2}(?:[:)]|\.(?=\s))\s*",
    re.I | re.A,
)
_INLINE: Final = re.compile(r"(?<=[?.!;,])\s+(?=\(?\d{1,2}[.)]\s)", re.A)
_JSON: Final = re.compile(r"(?:\{[^\[]*+)?\[\s*+(\".*\")\s*+,?\s*+\]\s*+\}?[,;]?")
_JSON_TEXT: Final = re.compile(r'"((?:[^"\\]|\\.)+)"')
_NOTHING: Final = r"(?:none|nothing|nil|null|n/?a|not applicable|empty|keine|aucune?|ninguna|nessuna|nada|无|没有|なし)"
_NEEDED: Final = r"(?:needed|required|necessary)"
_KIND: Final = r"(?:further|more|additional|other|new|relevant|useful|helpful|web|online)"
_SEARCH: Final = r"(?:search(?:es)?|quer(?:y|ies)|(?:sub[- ]?)?questions?|information|passages?|statements?|need)"
_REFUSALS: Final = (
    r"(?:\{[^\[]*)?\[\s*\]\s*\}?$",  # an empty list
    rf"\W*(?:(?:there (?:is|are) )?{_NOTHING}|no)\s*(?:[.,;:!)(\]\"'`*]|\s[-–—]\s|$)",
    rf"\W*{_NOTHING} (?:\w+ )?(?:{_NEEDED}|found|relevant|missing|helps?|of (?:the|these|them))\b",
    rf"(?:there (?:is|are) )?no (?:{_KIND} )*{_SEARCH}(?: \w+)?(?: (?:is|are))?(?: {_NEEDED}| found| available)?"
    r"(?: (?:here|for|to|in|at|as|because)\b.*)?\W*$",
    rf"(?:(?:a|any|this|{_KIND}) )*search(?:es|ing)? (?:is|are) (?:not |un){_NEEDED}\b",
    rf"(?:not |un){_NEEDED}\b",
    r"(?:i|we|you) (?:do not|don.?t) need to search\b",
    r"(?:the |these |this )?(?:quotes?|passages?|sources?|documents?|text|context) (?:do|does) not "
    r"(?:contain|mention|say|help|provide|include|answer|state)\b",
)
_REFUSED: Final = re.compile("|".join(_REFUSALS), re.I)
_QUOTES: Final = '"“”„«»`'


def items_of(line: str) -> list[str]:
    """The items of one line, cleaned; [] for a heading or a fence of code. One may be empty."""
    line = line.strip()
    if line.startswith("```"):
        return []
    if found := _JSON.fullmatch(line):
        return [cleaned(text.replace('\\"', "'")) for text in _JSON_TEXT.findall(found[1])]
    parts = _INLINE.split(line) if _NUMBER.match(line) else [line]
    return [item for part in parts if not (item := cleaned(part)).endswith((":", "："))]


def cleaned(item: str) -> str:
    """An item without bullet, number, label, emphasis and quotes around it. Cleaning it again changes nothing."""
    before = ""
    while before != item:
        before = item
        item = item.replace("**", "").strip().rstrip(",;").rstrip()
        for match in (_BULLET.match, _NUMBER.match, _LABEL.match):
            if found := match(item):
                item = item[found.end() :]
        item = _without_quotes(item.strip())
    return item


def has_declined(line: str) -> bool:
    """Whether a line says, in one of many ways, that there is nothing to write: "NONE.", "No search is needed"."""
    return _REFUSED.match(cleaned(line)) is not None


def _without_quotes(item: str) -> str:
    """Quotes around the whole are stripped, and one without its other end; not those around a part of it."""
    if len(item) > 1 and item[0] in "'‘" and item[-1] in "'’":
        return item[1:-1]
    count = sum(character in _QUOTES for character in item)
    starts, ends = item[:1] in _QUOTES, item[-1:] in _QUOTES
    if item and count == starts + ends and (count == 1 or len(item) > 1):
        return item[starts : len(item) - ends]
    return item


# Lines out of pieces of text, without what a model thinks aloud between <think> and </think>.


LINE_ENDS: Final = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")  # those of str.splitlines
_TAG: Final = re.compile(r"<(/?)think(?:ing)?>\Z", re.I | re.A)
_LONGEST_TAG: Final = len("</thinking>")


class LineReader:
    """Cuts text into lines that are not blank. A line over the limit of characters is nonsense, and is left out."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._line: list[str] = []
        self._too_long = False
        self._tail = ""  # the last characters, also of a line that is too long: a tag may end there
        self._thinking = False

    def feed(self, piece: str) -> list[str]:
        """Lines that end in this piece."""
        found: list[str] = []
        for character in piece:
            if character in LINE_ENDS:
                found += self.end()
                continue
            if len(self._line) < self._max_chars + _LONGEST_TAG:
                self._line.append(character)
            else:
                self._too_long = True
            self._tail = self._tail[1 - _LONGEST_TAG :] + character
            if character == ">" and (tag := _TAG.search(self._tail)):
                found += self._at_tag(len(tag[0]), closing=bool(tag[1]))
        return found

    def end(self) -> list[str]:
        """The line that is under way, if it is one."""
        line = "".join(self._line)
        wanted = not (self._thinking or self._too_long or len(line) > self._max_chars) and line.strip()
        self._line, self._too_long, self._tail = [], False, ""
        return [line] if wanted else []

    def _at_tag(self, length: int, *, closing: bool) -> list[str]:
        if closing:  # what comes before it was thought, whether or not the text says where that began
            self._thinking = True
        else:
            del self._line[-length:]
        found = self.end()
        self._thinking = not closing
        return found


# Text of prompts and decisions: on one line, shortened, and folded for comparison.


_DIRECTION: Final = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")  # change the direction of writing
_FOLDED_WORD: Final = re.compile(r"[^\W_]++[+#]*+")  # C++ and C# are not the same
_MIN_REPEATED: Final = 6  # words: shorter texts may repeat themselves


def one_line(text: str) -> str:
    """The text without line ends, runs of blanks and characters that cannot be seen."""
    return " ".join(without_controls(" ".join(text.split())).split())


def without_controls(text: str) -> str:
    """A line without characters that control terminals or change the direction of writing."""
    return _DIRECTION.sub("", printable_lines(text))


def beginning(text: str, limit: int) -> str:
    """At most `limit` characters, cut at a blank where there is one."""
    text = text.strip()
    return text if len(text) <= limit else text[: limit + 1].rsplit(maxsplit=1)[0][:limit]


def folded_words(text: str) -> list[str]:
    """Words in lower case, in order."""
    return _FOLDED_WORD.findall(comparable(text))


def words_apart(text: str) -> list[str]:
    """The same, each character of a script without blanks a word."""
    return folded_words(_UNSPACED.sub(r" \g<0> ", text))


def folded(text: str) -> str:
    """What two texts that differ in case, blanks and punctuation only have in common. "" for punctuation alone."""
    return " ".join(folded_words(text))


def is_repetitive(text: str) -> bool:
    """True for what a small model writes that has fallen into a loop: most of its words are there before."""
    words = folded_words(text)
    return len(words) >= _MIN_REPEATED and 2 * len(set(words)) < len(words)


# Whether what a model wrote has to do with what it read: by the words that both have.
#
# Words are compared by their first letters, so that "mill" is in "mills". In scripts without blanks each character is
# a word. Knows no synonyms and no translation: what is put in wholly other words counts as foreign.


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
