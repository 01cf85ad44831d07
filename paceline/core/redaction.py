"""Redaction: names, numbers and addresses of a conversation become placeholders, and are put back in what comes of it.

What is found is decided by a `Finder`; `find_entities` is one by patterns, for English and German. All that is found in
any message is replaced in all of them, parts of names included, and each spelling has one placeholder, so that putting
back gives the text as it was. The map stays in this object. Text that looks like a placeholder is replaced as well.

Not found by patterns: what has no capital letter and no sign of being a name, in scripts without capitals nearly
everything; names that are common words; numbers of up to three digits, years, times of day; countries, languages,
months. A text without any of these may still tell who is meant.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from itertools import chain
from typing import Final, NamedTuple

from paceline.core.words import seen

KINDS: Final = (
    *("ACCOUNT", "ADDRESS", "AMOUNT", "DATE", "EMAIL", "LINK", "NAME", "NUMBER", "ORGANISATION", "PERSON", "PHONE"),
    *("PLACE", "TEXT"),
)
_KIND: Final = "|".join(KINDS)
# A placeholder as models write it: in lower case, with a blank or an escaped underscore, a possessive inside, without
# brackets.
_PLACEHOLDER: Final = re.compile(
    rf"\[({_KIND})(?:\\?_| )?(\d{{1,6}})((?:['’]?s)?)\]|(?<![A-Za-z0-9_])({_KIND})\\?_(\d{{1,6}})(?!\d)", re.IGNORECASE
)


def _beginnings(word: str) -> str:
    return f"{word[0]}(?:{_beginnings(word[1:])})?" if len(word) > 1 else word


# What may become a placeholder with the text that follows.
_PARTIAL: Final = re.compile(
    rf"(?:\[(?:(?:{'|'.join(map(_beginnings, KINDS))})|(?:{_KIND})(?:\\|\\?_| )?(?:\d{{1,6}}['’]?s?)?)?"
    rf"|(?<![A-Za-z0-9_])(?:{'|'.join(map(_beginnings, KINDS))}|(?:{_KIND})(?:\\|\\?_\d{{0,6}})))$",
    re.IGNORECASE,
)
_LONGEST: Final = max(map(len, KINDS)) + 12  # characters of one that is partial
_MOST_WORDS: Final = 12  # of what is looked for word by word
_FAR: Final = 3  # characters between two of its words
_ALNUM: Final = re.compile(r"[^\W_]+")


class Entity(NamedTuple):
    """A part of a text that is replaced."""

    start: int
    end: int
    kind: str


Finder = Callable[[str], Iterable[Entity]]


class Redactor:
    """The placeholders of one conversation."""

    def __init__(self, find: Finder | None = None) -> None:
        """find: None: by patterns."""
        self._find = find or find_entities
        self._found: dict[str, list[Entity]] = {}  # by text that was learnt
        self._placeholders: dict[str, str] = {}  # by value
        self._values: dict[str, str] = {}  # by placeholder, without brackets
        self._numbers: Counter[str] = Counter()
        self._known: dict[tuple[str, ...], tuple[str, str]] = {}  # words: kind and a value
        self._sizes: dict[str, set[int]] = {}  # by a first word: of how many words what is known may be

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Iterable[str]:
        """What must not leave."""
        return self._placeholders.keys()

    def learn(self, text: str) -> None:
        """Have all that is found in this text replaced in every text."""
        text = seen(text)
        found = self._found[text] = list(self._find(text))
        for entity in found:
            value = text[entity.start : entity.end]
            words = tuple(map(str.casefold, _ALNUM.findall(value)))
            if entity.kind == "TEXT" or not 0 < len(words) <= _MOST_WORDS:
                continue
            self._know(words, entity.kind, value)
            if entity.kind in ("NAME", "PERSON", "ORGANISATION") and len(words) > 1:
                for word in _ALNUM.findall(value):
                    if len(word) > 2 and not word.isdigit() and not _is_common_anywhere(word.casefold()):
                        self._know((word.casefold(),), entity.kind, word)

    def redact(self, text: str) -> str:
        """The text, as it is seen, without what was learnt, whether it was learnt itself or not."""
        text = seen(text)
        placeholders = (Entity(*match.span(), "TEXT") for match in _PLACEHOLDER.finditer(text))
        parts, at = [], 0
        for entity in _disjoint(text, chain(placeholders, self._found.get(text, ()), self._mentions(text))):
            parts += [text[at : entity.start], self._placeholder(text[entity.start : entity.end], entity.kind)]
            at = entity.end
        return "".join([*parts, text[at:]])

    def restore(self, text: str) -> str:
        """The text with the values of its placeholders. One that was never given stays as it is."""
        return _PLACEHOLDER.sub(self._value, text)

    def _know(self, words: tuple[str, ...], kind: str, value: str) -> None:
        self._known.setdefault(words, (kind, value))
        self._sizes.setdefault(words[0], set()).add(len(words))

    def _mentions(self, text: str) -> Iterator[Entity]:
        """Where what is known stands, in any case and with other marks between its words; the longest of several."""
        if not self._known:
            return
        tokens = list(_ALNUM.finditer(text))
        words = [token[0].casefold() for token in tokens]
        plain = not any(map(str.isupper, text))
        for at, token in enumerate(tokens):
            sizes = (size for size in self._sizes.get(words[at], ()) if at + size <= len(tokens))
            for size in sorted(sizes, reverse=True):
                kind, value = self._known.get(tuple(words[at : at + size]), ("", ""))
                gaps = (tokens[i + 1].start() - tokens[i].end() for i in range(at, at + size - 1))
                if not kind or max(gaps, default=0) > _FAR:  # another sentence, or a row of a table
                    continue
                common = size == 1 and token[0].islower() and not plain and _is_common_anywhere(words[at])
                if common and value != token[0]:  # the word that a name is made of
                    continue
                before = next((i for i, char in enumerate(value) if char.isalnum()), 0)
                exact = token.start() - before
                end = tokens[at + size - 1].end()
                if exact >= 0 and text.startswith(value, exact):
                    yield Entity(exact, exact + len(value), kind)
                else:
                    yield Entity(token.start(), end, kind)
                break

    def _placeholder(self, value: str, kind: str) -> str:
        if value not in self._placeholders:
            self._numbers[kind] += 1
            name = f"{kind}_{self._numbers[kind]}"
            self._placeholders[value], self._values[name] = f"[{name}]", value
        return self._placeholders[value]

    def _value(self, found: re.Match[str]) -> str:
        kind, number, suffix = found[1] or found[4], found[2] or found[5], found[3] or ""
        value = self._values.get(f"{kind.upper()}_{int(number)}")
        return found[0] if value is None else value + suffix


class Restorer:
    """Values put back in a text that comes in pieces: in any division the pieces are those of the whole."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._before, self._held = "", ""  # the last character that was given, and what was not given yet

    def push(self, text: str) -> str:
        """Text that is final."""
        text = self._held + text
        # Of a placeholder that ends where the text does the next piece may be a part.
        tail = max(0, len(text) - _LONGEST)
        partial = _PARTIAL.search(self._before + text, len(self._before) + tail)
        keep = len(text) if partial is None else partial.start() - len(self._before)
        return self._give(text[:keep], text[keep:])

    def flush(self) -> str:
        return self._give(self._held, "")

    def _give(self, text: str, held: str) -> str:
        whole = self._before + text
        restored = _PLACEHOLDER.sub(self._redactor._value, whole)[len(self._before) :] if text else ""
        self._before, self._held = (text[-1:] or self._before), held
        return restored


def _disjoint(text: str, entities: Iterable[Entity]) -> list[Entity]:
    """Entities in the order of the text. Where they overlap, the first keeps its place, of later ones the rest
    counts."""
    mask = bytearray(len(text))
    found: list[Entity] = []
    for start, end, kind in entities:
        while start < end and (free := mask.find(0, start, end)) >= 0:
            taken = mask.find(1, free, end)
            start = end if taken < 0 else taken
            if any(map(str.isalnum, text[free:start])):
                found.append(Entity(free, start, kind))
                mask[free:start] = b"\1" * (start - free)
    return sorted(found)


# ---- numbers and addresses ------------------------------------------------------------------------------------------
_MONTH: Final = (
    "(?:jan(?:uary|uar)?|feb(?:ruary|ruar)?|mar(?:ch)?|märz|apr(?:il)?|may|mai|june?|juni|july?|juli|aug(?:ust)?"
    "|sept?(?:ember)?|oct(?:ober)?|okt(?:ober)?|nov(?:ember)?|dec(?:ember)?|dez(?:ember)?)"
)
_MONEY: Final = "(?:€|euros?|eur|usd|chf|gbp|us-dollar|dollars?|pounds?|francs?|franken|cents?|£|\\$)"
_SCALE: Final = "(?:k|m|bn|thousand|million|billion|tausend|tsd\\.?|mio\\.?|mrd\\.?|million(?:en)?|milliarden?)"
_SUM: Final = "\\d++(?:[.,'’]\\d++)*+"
_TOP: Final = "(?:com|org|net|info|eu|de|at|ch|uk|io|dev|app|me|fr|nl|it|es|pl|us|co|biz|edu|gov)"
_URL: Final = r"[^\s<>\"'()\[\]{}]*[^\s<>\"'()\[\]{}.,;:!?]"  # to the end, without a sentence's marks
_STREET_DE: Final = (
    "(?:straße|strasse|str\\.|gasse|allee|weg|platz|ring|damm|ufer|chaussee|steig|pfad|markt|hof|graben|wall|steg)"
)
_STREET_EN: Final = (
    "(?:street|st|road|rd|avenue|ave|lane|ln|drive|dr|boulevard|blvd|court|ct|way|place|pl|square|sq|terrace|crescent"
    "|close|parkway|highway|gardens|mews|row|hill)"
)
_EMAIL: Final = re.compile(r"(?i)(?<![\w.+-])[\w.+-]++@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_ADDRESSED: Final = re.compile(rf"(?i)(?:https?://|www\.){_URL}")
_DOMAIN: Final = re.compile(rf"(?i)(?<![\w@.-])(?:[\w-]{{1,63}}\.){{1,5}}{_TOP}(?![.-]?\w)(?:/{_URL}|/)?")
_OF_USER: Final = re.compile(r"(?i)(?:/(?:home|users)/|[a-z]:\\users\\)[^\s\"'<>]++|(?<![\w@])@[a-z_][\w.]{1,30}\b")
_IBAN: Final = re.compile(r"(?i)\b[a-z]{2}\d{2} ?(?:[a-z]{4}|\d{4})(?: ?\d){6,26}+\b")
_GERMAN_STREET: Final = re.compile(
    rf"(?i)(?<![\w'’-])(?:(?:(?-i:[A-ZÄÖÜ])[\w-]{{1,30}} ){{0,2}}[\w'’-]{{0,30}}{_STREET_DE}"
    r"|(?:am|an der|auf der|auf dem|im|in der|in den|zum|zur|unter den) [a-zäöü][\w-]{2,30})"
    r",? \d{1,4}(?: ?[a-h])?\b(?:,? (?:d-)?\d{5}(?: [a-zäöü][\w-]{2,30})?)?"
)
_SQUARE: Final = re.compile(r"(?i)\b(?:straße|strasse|platz|allee|ring) (?:de[rs] |[a-z]+ ){1,2}\d{1,4}(?: ?[a-h])?\b")
_HOUSE: Final = re.compile(r"(?i)(?<=\bat )\d{1,5} (?-i:[A-Z])\w{2,30}")
_ENGLISH_STREET: Final = re.compile(
    rf"(?i)\b\d{{1,5}}[a-z]?,? (?:[\w'’.-]{{1,30}} ){{1,4}}{_STREET_EN}\b\.?"
    r"|\b[a-z]{1,2}\d[a-z\d]? \d[a-z]{2}\b|\b(?:p\.? ?o\.? box|postfach) [\d ]{2,9}\d"
)
_TOWN: Final = re.compile(r"(?i)\b(?:(?-i:D-)?\d{5}|\d{4}) (?-i:[A-ZÄÖÜ][\wäöüß-]{2,30})")
_DAY: Final = re.compile(rf"(?i)\b\d{{1,2}}(?:st|nd|rd|th|\.)?(?: of)? ?{_MONTH}\b\.?(?:,? ?\d{{4}}\b)?")
_IN_MONTH: Final = re.compile(rf"(?i)\b{_MONTH}\b\.? (?:\d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}}\b)?|\d{{4}}\b)")
_DIGIT_DATE: Final = re.compile(r"(?<![\d.])\d{1,4}([./-])\d{1,2}\1\d{2,4}(?!\w)|(?<![\d.])\d{1,2}\.\d{1,2}\.(?!\.?\d)")
_BORN: Final = re.compile(r"(?i)(?:\b(?:born|geboren|geb\.|jahrgang|\*)(?: in| im jahr| im)? ?)\d{4}\b")
_SUM_OF: Final = re.compile(rf"(?i)(?:[€$£¥]|\b(?:eur|usd|chf|gbp)\b) ?{_SUM}(?: ?{_SCALE}\b)?")
_SUM_IN: Final = re.compile(rf"(?i)(?<![\w.,]){_SUM}(?:,-)? ?(?:{_SCALE} )?{_MONEY}(?!\w)")
_PHONE: Final = re.compile(
    r"(?<![\w+.,])(?:\+|00|\(?0(?=[1-9]))\d[\d ()/.-]{5,20}\d(?!\w)|\(\d{2,5}\) ?\d[\d -]{4,14}\d(?!\w)"
)
_PLATE: Final = re.compile(r"(?i)\b[a-zäöü]{1,3}-[a-z]{1,2} ?\d{1,4}[eh]?\b|\b[a-z]{2}(?: ?\d{2}){3} ?[a-d]\b")
_ID: Final = re.compile(r"(?i)\b\d{2} ?\d{6} ?[a-z] ?\d{3}\b|(?<![\w:])(?:[\da-f]{0,4}:){3,7}[\da-f]{0,4}\b")
_PATTERNS: Final = (  # the first ones keep their place
    ("EMAIL", _EMAIL),
    ("LINK", _ADDRESSED),
    ("LINK", _DOMAIN),
    ("LINK", _OF_USER),
    ("ACCOUNT", _IBAN),
    ("ADDRESS", _GERMAN_STREET),
    ("ADDRESS", _SQUARE),
    ("ADDRESS", _HOUSE),
    ("ADDRESS", _ENGLISH_STREET),
    ("ADDRESS", _TOWN),
    ("DATE", _DAY),
    ("DATE", _IN_MONTH),
    ("DATE", _DIGIT_DATE),
    ("DATE", _BORN),
    ("AMOUNT", _SUM_OF),
    ("AMOUNT", _SUM_IN),
    ("PHONE", _PHONE),
    ("NUMBER", _PLATE),
    ("NUMBER", _ID),
)
_DIGITS: Final = re.compile(r"(?<!\w)\d++(?:[ .,/:-]\d++)*+(?!\w)")
_MIXED: Final = re.compile(r"(?<!\w)[A-Za-z0-9]++(?:[-_/.:][A-Za-z0-9]++)*+(?!\w)")
_YEAR: Final = re.compile(r"(?:1[89]|20)\d\d(?:[-/](?:(?:1[89]|20)?\d\d))?")
_TIME: Final = re.compile(r"\d{1,2}[:.]\d{2}(?::\d{2})?")
_BLOCK: Final = 1 << 14  # characters


def find_numbers(text: str) -> Iterator[Entity]:
    """Addresses of all kinds, dates, amounts and numbers."""
    blocks = list(_blocks(text))
    for kind, pattern in _PATTERNS:
        for match in _matches(pattern, text, blocks):
            yield Entity(match.start(), match.end(), kind)
    for match in _matches(_DIGITS, text, blocks):
        digits = sum(map(str.isdigit, match[0]))
        apart = any(each in match[0] for each in " -/:")
        if digits >= (5 if apart else 4) and not _YEAR.fullmatch(match[0]) and not _TIME.fullmatch(match[0]):
            yield Entity(match.start(), match.end(), "NUMBER")
    for match in _matches(_MIXED, text, blocks):
        token, digits = match[0], sum(map(str.isdigit, match[0]))
        marked = not token.islower() or digits > 3 or "-" in token  # else it may be such as sha256
        if digits > 2 and marked and len(token) > 4 and any(map(str.isalpha, token)):
            yield Entity(match.start(), match.end(), "NUMBER")


def _matches(pattern: re.Pattern[str], text: str, blocks: Iterable[tuple[int, int]]) -> Iterator[re.Match[str]]:
    return chain.from_iterable(pattern.finditer(text, *block) for block in blocks)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Parts of a text, of whole lines, since what is looked for goes over none: other threads wait for as long as
    nothing is found in one. Not handled: a line of a megabyte, for seconds."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _BLOCK) + 1 or len(text)
        yield start, end
        start = end


# ---- common words ---------------------------------------------------------------------------------------------------
def _sections() -> Iterator[tuple[str, frozenset[str]]]:
    """The words of English and German in `lexicon.txt`, by section; of other languages nothing is known."""
    text = (resources.files(__package__) / "lexicon.txt").read_text("utf-8")
    for section in text.split("\n[")[1:]:
        name, _, words = section.partition("]")
        yield name, frozenset(words.partition("\n")[2].split())


_LEXICON: Final = dict(_sections())
_DETERMINERS, _CAPITALISED, _TITLES = _LEXICON["determiners"], _LEXICON["capitalised"], _LEXICON["titles"]
_NAMERS, _LEGAL, _GIVEN, _SAYS = _LEXICON["namers"], _LEXICON["legal"], _LEXICON["given"], _LEXICON["says"]
_LINKS, _PLACES, _HEADS, _FIRMS = _LEXICON["links"], _LEXICON["places"], _LEXICON["heads"], _LEXICON["firms"]
_ENGLISH, _GERMAN, _OF_NAMES = _LEXICON["english"], _LEXICON["german"] | _DETERMINERS, _LEXICON["endings"]
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
_LONGEST_WORD: Final = 60  # letters
_HEAD: Final = 4  # letters of a noun at the end of a compound


def _is_common(word: str, known: frozenset[str]) -> bool:
    """The word, in lower case, is a common one of the language of these, with or without an ending."""
    if word in known or word in _CAPITALISED:
        return True
    stems = (word[: -len(ending)] for ending in _ENDINGS if word.endswith(ending))
    return any(len(stem) > 2 and not known.isdisjoint(_listings(stem)) for stem in stems)


def _is_common_anywhere(word: str) -> bool:
    return _is_common(word, _ENGLISH) or _is_common(word, _GERMAN)


def _is_common_shape(word: str, *, german: bool) -> bool:
    """Its end tells that the word, in lower case, is a noun or an adverb of its language, though it is not listed."""
    if len(word) > _LONGEST_WORD:
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


# ---- names ----------------------------------------------------------------------------------------------------------
_WORD: Final = re.compile(r"[^\W\d_]++(?:['’-][^\W\d_]++)*+")
_ENDS: Final = re.compile(r"[.!?:;\n\r•*#>|\"“”„»«(\[]")  # a capital letter behind one means nothing
_CUES: Final = re.compile(
    r"(?:my name is|my name's|i am called|i'm called|call me|is called|is named|named|ich hei(?:ß|ss)e|mein name ist"
    r"|hei(?:ß|ss)t|namens|genannt|(?:vor|nach)?name:|name ist|regards,?|cheers,?|grüße,?|gruß,?|lg,?|mfg,?|dear"
    r"|liebe[rs]?|hallo|hello|hi|hey|i live in|i'm from|i am from|lives in|live in|wohne in|wohnt in|komme aus"
    r"|i work at|i work for|works at|works for|arbeite bei|arbeitet bei|arbeite für"
    r"|(?:hi|hello|hey|hallo|moin|morning|tag|abend)[,.!]? (?:i'm|i am|this is|ich bin|hier ist|hier spricht))\s+$",
    re.IGNORECASE,
)
_CUE: Final = 32  # characters before a word that a cue may have
_MAX_WORD: Final = 40  # letters: longer ones are no names


class _Words:
    """The words of a text that may be names."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spans = [match.span() for match in _WORD.finditer(text)]
        self._words = [text[start:end] for start, end in self._spans]
        self._folded = [word.casefold() for word in self._words]
        counts = Counter(self._folded)
        german, english = (sum(counts[word] for word in _LEXICON[f"signs of {each}"]) for each in ("german", "english"))
        self._german = german > english
        self._known = _GERMAN if self._german else _ENGLISH
        letters = sum(map(str.isalpha, text))
        upper = sum(map(str.isupper, text))
        self._shouts = upper > 0.7 * letters
        self._plain = not upper  # nothing has a capital
        titled = sum(word[0].isupper() for word in self._words)
        self._titles = len(self._words) > 3 and titled > 0.8 * len(self._words)  # Every Word Is Capitalised
        self._lower = {word for word in self._words if word.islower()}

    def entities(self) -> Iterator[Entity]:
        at, count = 0, len(self._words)
        while at < count:
            if not self._is_name(at):
                at += 1
                continue
            end = at + 1
            while end < count and self._goes_on(end):
                end += 1
            first = at - 1 if self._before(at) in _HEADS and self._words[at - 1][0].isupper() else at
            yield Entity(self._spans[first][0], self._spans[end - 1][1], self._kind(at, end))
            at = end

    def _gap(self, at: int) -> str:
        """Between a word and the one before."""
        return self._text[self._spans[at - 1][1] : self._spans[at][0]] if at else "\n"

    def _before(self, at: int) -> str:
        """The word right before it, folded; empty where something stands between."""
        near = at and (self._gap(at) == " " or (self._gap(at) == ". " and self._is_short(at - 1)))
        return self._folded[at - 1] if near else ""

    def _is_short(self, at: int) -> bool:
        """An initial, or a title, whose point ends no sentence."""
        return len(self._words[at]) == 1 or self._folded[at] in _TITLES

    def _begins(self, at: int) -> bool:
        return not self._before(at) and _ENDS.search(self._gap(at)) is not None

    def _is_name(self, at: int) -> bool:
        word, folded = self._words[at], self._folded[at]
        before = self._before(at)
        if len(word) > _MAX_WORD or (len(word) < 2 and before not in _TITLES):
            return False
        if folded in _CAPITALISED or folded in _TITLES or folded in _LEGAL:
            return False
        capital = word[0].isupper()
        if before in _TITLES and (capital or self._plain):
            return True
        if folded in _GIVEN and (capital or not _is_common_anywhere(folded)):
            return True
        common = self._is_common(folded)
        if self._cued(at) and not (_is_common(folded, self._known) or (not capital and common)):
            return True
        if self._is_firm(at) and not common:
            return True
        if self._plain and (before in _NAMERS or before in _PLACES) and not common:
            return True
        if not capital or self._shouts or self._titles:
            return (self._shouts or self._titles) and not common
        return self._is_german_name(at) if self._german else self._is_english_name(at)

    def _cued(self, at: int) -> bool:
        start = self._spans[at][0]
        return _CUES.search(self._text, max(0, start - _CUE), start) is not None

    def _is_common(self, folded: str) -> bool:
        return _is_common(folded, self._known) or _is_common_shape(folded, german=self._german)

    def _is_firm(self, at: int) -> bool:
        """A legal form of firms follows, at once or after another word."""
        following = [self._folded[i] for i in (at + 1, at + 2) if i < len(self._words) and self._gap(i) == " "]
        return not _LEGAL.isdisjoint(following)

    def _is_english_name(self, at: int) -> bool:
        folded = self._folded[at]
        if not self._begins(at):
            return folded not in ("ok", "okay")
        if _is_common(folded, _ENGLISH) or folded in self._lower:
            return False
        return self._is_followed(at) or not _is_common_shape(folded, german=False)

    def _is_german_name(self, at: int) -> bool:
        folded, before = self._folded[at], self._before(at)
        if (before in _NAMERS or before in _HEADS) and not _is_common(folded, _GERMAN):
            return True
        if self._is_common(folded) or folded in self._lower:
            return False
        if self._begins(at):
            return self._is_followed(at) or not folded.endswith(("e", "en", "st", "t", "er"))
        return not (before in _DETERMINERS or before.endswith(("em", "es")) or self._is_described(at))

    def _is_described(self, at: int) -> bool:
        """An adjective stands before it, and a determiner before that."""
        before = self._before(at)
        return bool(before) and before.endswith(("e", "en", "er")) and self._before(at - 1) in _DETERMINERS

    def _is_followed(self, at: int) -> bool:
        """What follows makes the first word of a sentence a name: a verb of people, or another name."""
        if at + 1 >= len(self._words) or "\n" in self._gap(at + 1):
            return True  # it stands alone in its line
        if self._gap(at + 1) not in (" ", ". "):
            return False
        following = self._folded[at + 1]
        another = self._words[at + 1][0].isupper() and not self._is_common(following)
        acts = self._german and following.endswith("t") and not self._folded[at].endswith(("weise", "lich", "ens"))
        return following in _SAYS or acts or (another and following not in _CAPITALISED)

    def _goes_on(self, at: int) -> bool:
        """The word is a part of the name that ends before it."""
        gap, word, folded = self._gap(at), self._words[at], self._folded[at]
        if gap not in (" ", "-", " & ", "\u00a0") and not (gap == ". " and self._is_short(at - 1)):
            return False
        if folded in _LEGAL and gap == " ":
            return word[0].isupper() or self._plain
        if folded in _LINKS and word.islower():
            return at + 1 < len(self._words) and self._gap(at + 1) == " " and self._is_part(at + 1)
        return self._is_part(at)

    def _is_part(self, at: int) -> bool:
        word, folded = self._words[at], self._folded[at]
        if not word[0].isupper() or folded in _TITLES:
            return self._plain and not self._is_common(folded)
        if folded in _FIRMS or (not self._german and not (self._shouts or self._titles)):
            return folded not in _CAPITALISED
        return folded not in self._known and folded not in _CAPITALISED

    def _kind(self, at: int, end: int) -> str:
        inside, before = self._folded[at:end], self._before(at)
        if set(inside[1:]) & _LEGAL or before in ("firma", "company", "firm"):
            return "ORGANISATION"
        if before in _TITLES or inside[0] in _GIVEN or before in _NAMERS - {"stadt", "city"}:
            return "PERSON"
        return "PLACE" if before in ("in", "nach", "near", "stadt", "city") else "NAME"


def find_names(text: str) -> Iterator[Entity]:
    """Names of people, firms and places, by capitals, neighbours and a lexicon."""
    return _Words(text).entities()


def combined(*finders: Finder) -> Finder:
    """What any of them finds; where they overlap, the first keeps its place."""

    return lambda text: _disjoint(text, chain.from_iterable(finder(text) for finder in finders))


find_entities: Final = combined(find_numbers, find_names)  # by patterns
