"""The place of an answer: how much of a question its sentence, its line and the name of its value have.

The encoder takes the value that stands nearest: of a warranty the model's number for the serial one, of a list the last
line's name. Here a document is seen as sentences under their headings, and one as named values where it is written so
("Seats: 3; Fee: 14", `device.serial: 71`, "Fee | 14"). A place orders the spans; whether there is an answer at all it
does not tell. English. Not handled: synonyms but of money, tables without names of columns, values over several lines.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.core.words import folded

_OTHER_NAME = 1.0  # what it takes off a span's log odds, for each word of another value's name that is asked for
_MOST_WORDS = 2  # of a name
_OTHER_LINE = 2.25  # that another sentence has all words of the question, and this line of a list none
_OTHER_SENTENCE = 0.75  # likewise of running text, which goes on with what the sentence before is about
_OTHER_KIND = 2.25  # that a price or a number of things is asked for, and another span is one

_WORD = re.compile(r"\w+")
_STEM = 5  # letters that tell a word from others
_COMMON_WORDS = (
    "a an the of in on at to for from by with and or is are was were be been do does did can could will would "
    "should may must has have had i we you he she it they my our your his her its their me us what when where who "
    "whom whose which why how much many long often far old that this there one as if not no any all some get got "
    "up out per than then so please tell these those into during again more most other such only own same too "
    "very just both each few while because until through let"
)
_COMMON = frozenset(_WORD.findall(_COMMON_WORDS))
_FORMS = (  # of verbs that change within, each before what it is of
    "began begin bought buy broke break brought bring built build came come chose choose drew draw drove drive "
    "ate eat fed feed fell fall felt feel flew fly forgot forget found find gave give grew grow held hold hid "
    "hide hung hang kept keep knew know led lead left leave lent lend lost lose made make met meet paid pay ran "
    "run rode ride rose rise sang sing sat sit saw see sent send shot shoot slept sleep sold sell spent spend "
    "spoke speak stole steal stood stand swam swim taught teach threw throw told tell took take thought think "
    "went go woke wake won win wore wear wrote write"
)
_IRREGULAR = dict(re.findall(r"(\w+) (\w+)", _FORMS))
SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\b[A-Z][a-z])[.!?]\s+(?=[A-Z0-9])")  # not behind "Dr." or an initial
_SENTENCE = re.compile(rf"\n(?![a-z]+,? (?!=))|{SENTENCE_END.pattern}")  # not where prose goes on
_HEADING = re.compile(r"\s*(?:\[{1,2}([^][\n]{1,80})\]{1,2}|#{2,6} ([^\n]{1,120}))\s*$")  # not the document's
_OUTER = re.compile(r"( *)(?:- )?([^\s:#][^:\n]{0,60}):\s*$")  # a line that those below, further in, belong to
_COUNTED = re.compile(
    r"^how\smany\s(.{1,60}?)\s(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|must|should)\s",
    re.IGNORECASE,
)
_NUMERALS = (
    r"one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    r"eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|dozen"
)
_NUMBER = re.compile(rf"\d|\b(?:{_NUMERALS})\b", re.IGNORECASE)
_THINGS = re.compile(r"(?:[ \n]+[\w'-]{1,40}){1,4}")  # behind a number, "14 larch panels"
_FILE = re.compile(r"[^\n/]{1,100}\.[a-z]{1,6}\n")  # the title of a document without another
_ITEM = re.compile(r"\s*(?:[-*+\u2022]|\d{1,3}[.)])\s+")
_NAMED = re.compile(r"(?:[\w.]{0,60}\[\d{1,6}\]: )?([^:;|]{1,60})(?::[*_]{0,3}\s+|\s[|=]\s)(?=\S)")
_WHOLE = re.compile(
    r"(?<=^how\smuch)\sof\s.{1,80}?\s(?=(?:is|are|was|were|do|does|did|will|must|can)\s)", re.IGNORECASE
)
_MINE = re.compile(r"\b(?:I|me|my|myself|mine)\b")
_YOURS = re.compile(r"your?\b", re.IGNORECASE)  # as letters and bills name what is mine
_JOINED = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[_.]")  # words of a name
_MONEY = r"costs?|charged?|charges|prices?|pay|paid|rent|fees?|fares?|deposit|fine|owe|spent|bill"
_ASKS_MONEY = re.compile(rf"^(?:how\smuch|what)\b.*\b(?:{_MONEY})\b", re.IGNORECASE)
_ASKED = r"ask(?:s|ed|ing)?|wants?|wanted|quotes?|quoted|offers?|offered|bids?|raised?"  # of a sum
_ASKS_PRICE = re.compile(
    rf"^how\smuch\s(?:(?:is|are|was|were)\b|(?:do|does|did|will)\b.*\b(?:{_ASKED})\b)|{_ASKS_MONEY.pattern}",
    re.IGNORECASE,
)
_CURRENCY = (
    r"[$\u00a3\u00a5\u20ac]|\b(?:EUR|USD|GBP|CHF|JPY|NOK|SEK|DKK|(?:euro|dollar|pound|franc|mark|cent)s?|pence)\b"
)
_SUM = re.compile(r"\d{1,3}(?:[.,' ]?\d{3})*[.,]\d\d")  # an amount, where no currency is told
_PAID = re.compile(_CURRENCY, re.IGNORECASE)
_OF_MONEY = re.compile(
    rf"(?<![^\W_])(?:{_MONEY}|rates?|total|amount|sum|premium|value)(?![^\W_])|{_CURRENCY}", re.IGNORECASE
)


def words_in(text: str) -> list[str]:
    """The words of a text that tell it from others, in small letters."""
    return [word for word in _WORD.findall(folded(text)) if word not in _COMMON]


def shared_words(question: str, text: str) -> float:
    """Share of the question's words that the text holds, by their first letters; 0 for a question without words."""
    asked = _stems(question)
    return len(asked & _stems(text)) / len(asked) if asked else 0.0


def _stems(text: str) -> frozenset[str]:
    return frozenset(map(_stem, words_in(_JOINED.sub(" ", text))))


def _stem(word: str) -> str:
    word = _IRREGULAR.get(word, word)
    return (word[:-1] if len(word) > 3 and word[-1] == "s" != word[-2] else word)[:_STEM]


class _Place(NamedTuple):
    begin: int
    value: int  # where that begins, behind its name
    name: str  # "" where it has none
    num_named: int  # words of the name and of its heading, if all of the name are asked for; else 0
    num_shared: int  # words of the question that its sentence has
    is_line: bool  # of a list
    is_field: bool  # of a record


class Places:
    """The places of a document, and how they fit a question."""

    def __init__(self, question: str, document: str) -> None:
        self._document = document
        asked = _WHOLE.sub(" ", question)  # which is named where the whole is
        self._is_share = asked != question
        self._asked = frozenset(map(_stem, words_in(asked)))
        self._is_mine = _MINE.search(question) is not None
        self._is_price = _ASKS_PRICE.search(question) is not None
        self._is_file = _FILE.match(document) is not None
        counted = _COUNTED.match(question)
        self._counted = _stems(counted[1]) if counted else frozenset()
        self._places = list(self._found())
        self._most = max((place.num_shared for place in self._places), default=0)

    def _found(self) -> Iterator[_Place]:
        begin, headings = 0, list[tuple[int, frozenset[str]]]()
        for end in [*(found.end() for found in _SENTENCE.finditer(self._document)), len(self._document)]:
            sentence = self._document[begin:end]
            while headings and self._is_beside(sentence, headings[-1][0]):
                headings.pop()
            above = frozenset[str]().union(*(words for _, words in headings))
            if heading := _HEADING.match(sentence):
                headings = [(-1, self._asked & _stems(heading[1] or heading[2]))]
            elif outer := _OUTER.match(sentence):
                headings.append((len(outer[1]), self._asked & _stems(outer[2])))
            item = _ITEM.match(sentence)
            is_line = self._document[max(0, begin - 1) : begin] in ("", "\n")
            at = begin + (len(item[0]) if item else 0)
            parts = self._document[at:end].split("; ")
            is_record = len(parts) > 1 and all(map(_NAMED.match, parts[:2]))
            of_all = _stems(sentence) | above
            for part in parts:
                name = named[1] if (named := _NAMED.match(part)) else ""
                words = _stems(name)
                num_named = min(len(words | above), _MOST_WORDS) if words and words <= self._asked else 0
                value = at + (named.end() if named else 0)
                held = _stems(part) | above if self._is_share else of_all
                shared = len(self._asked & held) + (self._is_mine and _YOURS.match(name) is not None)
                yield _Place(at, value, name, num_named, shared, is_line and bool(item or name), is_record)
                at += len(part) + 2
            begin = end

    @staticmethod
    def _is_beside(sentence: str, indent: int) -> bool:
        """True of a line that is no further in than its heading."""
        return indent >= 0 and bool(sentence.strip()) and len(sentence) - len(sentence.lstrip(" ")) <= indent

    def costs(self, spans: Sequence[tuple[int, int]]) -> list[float]:
        """What their places take off the log odds of these parts of the document, beside each other."""
        starts = [place.begin for place in self._places]
        places = [self._places[max(0, bisect_right(starts, begin) - 1)] for begin, _ in spans]
        named = [place.num_named * (begin >= place.value) for place, (begin, _) in zip(places, spans, strict=True)]
        costs = [_OTHER_NAME * (max(named) - words) for words in named]
        for at, (place, (begin, _)) in enumerate(zip(places, spans, strict=True)):
            is_name = (place.is_field and begin < place.value) or (not place.begin and self._is_file)
            costs[at] += _OTHER_KIND * is_name  # which is no answer
        if self._most:
            for at, place in enumerate(places):
                weight = _OTHER_LINE if place.is_line or self._is_share else _OTHER_SENTENCE
                if not named[at]:  # a name that is asked for tells more
                    costs[at] += weight * (1 - place.num_shared / self._most)
        for is_one in (self._is_paid if self._is_price else None, self._is_counted if self._counted else None):
            of_kind = [is_one(*span, place.name) for span, place in zip(spans, places, strict=True)] if is_one else []
            if any(of_kind):
                costs = [cost + _OTHER_KIND * (not is_it) for cost, is_it in zip(costs, of_kind, strict=True)]
        return costs

    def _is_counted(self, begin: int, end: int, name: str) -> bool:
        """True of a number behind which what is counted stands, or under its name."""
        things = _THINGS.match(self._document, end)
        told = f"{self._document[begin:end]} {things[0] if things else ''} {name}"
        return _NUMBER.search(self._document[begin:end]) is not None and not self._counted.isdisjoint(_stems(told))

    def _is_paid(self, begin: int, end: int, name: str) -> bool:
        """True of a number with a currency, and of one under a name, of its column or property, that tells of money."""
        text = self._document[begin:end]
        if not any(map(str.isdigit, text)) or len(_PAID.findall(text)) > 1:  # "90 EUR, so 10 EUR" is two
            return False
        return (
            _SUM.fullmatch(text) or _PAID.search(self._document[max(0, begin - 2) : end + 8]) or _OF_MONEY.search(name)
        ) is not None
