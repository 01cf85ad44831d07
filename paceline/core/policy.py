"""The owner's rules: which documents may leave how far, who may read them, and how much a day may take.

A rule only ever narrows: what holds for an answer is the strictest of what the request asks for and of what the rules
say, and each narrowing has its reason. What a document says is nothing that is looked at here: its path, its name, its
store and the attributes that its owner has given it are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Final, Literal, Self, get_args

from paceline.core.side import Side

Privacy = Literal["open", "document-private", "answer-private", "local-only"]
PRIVACY_LEVELS: Final[tuple[Privacy, ...]] = get_args(Privacy)
Rule = Literal["never leaves", "public passages only", "ask me"]
HIGHEST: Final[Mapping[Rule, Privacy]] = {
    "never leaves": "local-only",
    "public passages only": "answer-private",
    "ask me": "open",  # once its owner has confirmed it
}
Budget = Literal["joules", "bytes", "cloud_tokens"]
BUDGETS: Final[tuple[Budget, ...]] = get_args(Budget)
ANY_KEY: Final = "*"
_BRACKET: Final = re.compile(r"\[!?\]?[^\]\[]*\]")
_RANGE: Final = re.compile(r"(.)-(.)")


def strictest(*levels: Privacy) -> Privacy:
    return max(levels, key=PRIVACY_LEVELS.index)


# ---- documents and patterns that name them --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DocumentFacts:
    """What is known of a document besides its text."""

    paths: tuple[str, ...]  # of its file, and its name
    stores: tuple[str, ...] = ()  # name and id of its vector store
    tags: Mapping[str, object] = field(default_factory=dict)  # its attributes in that store


_STRANGE: Final = re.compile(r"\$|~[^/]+/|(?:stores|tags):")  # of shells, and misspelt


@dataclass(frozen=True, slots=True)
class Pattern:
    """Names documents by `store:NAME`, `tag:KEY=VALUE`, or a path, in which `*` stands for any characters but `/` and
    the part `**` for any parts. A path from the root (`/` or `~`) names a file, or a folder with all below it; any
    other a file or a folder of that name, wherever it is. Upper and lower case are the same, and so are forms of
    Unicode."""

    text: str
    _kind: Literal["store", "tag", "path"]
    _parts: tuple[str, ...]  # of a path, with `**` for what may be around; else one

    @classmethod
    def parse(cls, text: str, home: str) -> Self:
        """home: what `~` stands for. Raises ValueError for what names nothing, or everything."""
        strange = text != text.strip() or bool(_STRANGE.match(text))
        brackets = _BRACKET.findall(text)
        if text.count("[") > len(brackets) or any(
            first > last for each in brackets for first, last in _RANGE.findall(each)
        ):
            raise ValueError(f"{text!r} is no pattern: it has a [ without its ], or a range that is empty")
        kind, colon, rest = text.partition(":")
        if colon and kind in ("store", "tag") and not strange:
            key, equals, value = rest.partition("=")
            if not rest or (kind == "tag" and not (key and equals and value)):
                raise ValueError(f"{text!r} names nothing: write store:NAME or tag:KEY=VALUE")
            return cls(text, "store" if kind == "store" else "tag", (_folded(rest),))
        path = home.rstrip("/") + text[1:] if text == "~" or text.startswith("~/") else text
        if not path.strip("/*"):
            raise ValueError(f"{text!r} names every document, or none: write a folder, a name or a pattern for names")
        around = () if path.startswith("/") else ("**",)
        if strange or "://" in path or (around and not {"", ".", ".."}.isdisjoint(path.rstrip("/").split("/"))):
            raise ValueError(
                f"{text!r} can name no document: write a path from / or ~/, a name, store:NAME or tag:KEY=VALUE, "
                "without variables, . and .., and blanks at its ends"
            )
        return cls(text, "path", (*around, *_folded(path.rstrip("/")).split("/"), "**"))

    def matches(self, document: DocumentFacts) -> bool:
        match self._kind:
            case "store":
                return any(fnmatchcase(_folded(value), self._parts[0]) for value in document.stores)
            case "tag":
                tags = (f"{key}={value}" for key, value in document.tags.items())
                return any(fnmatchcase(_folded(value), self._parts[0]) for value in tags)
            case _:
                return any(_fits(_folded(path).split("/"), self._parts) for path in document.paths)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    """True if these patterns, part by part, are of the whole path."""
    at = place = 0
    again: tuple[int, int] | None = None  # behind the last `**`, and the part from which it is tried next
    while place < len(parts):
        if at < len(patterns) and patterns[at] == "**":
            at += 1
            again = at, place + 1
        elif at < len(patterns) and fnmatchcase(parts[place], patterns[at]):
            at, place = at + 1, place + 1
        elif again is not None:
            at, place = again
            again = at, place + 1
        else:
            return False
    return all(each == "**" for each in patterns[at:])


@dataclass(frozen=True, slots=True)
class DocumentRule:
    rule: Rule
    pattern: Pattern

    def __str__(self) -> str:
        return f"{self.rule}: {self.pattern.text}"


# ---- keys, models, budgets ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Grant:
    """What a key, or a model, may at most."""

    whose: str  # "key notebook", "model m"
    reads: tuple[Pattern, ...] | None = None  # documents; None: any
    models: tuple[str, ...] | None = None  # of a key: names of models; None: any
    privacy: Privacy = "open"  # the least strict level
    confirms: bool = False  # of a key: it may confirm documents that are to be asked for

    def may_read(self, document: DocumentFacts) -> bool:
        return self.reads is None or any(pattern.matches(document) for pattern in self.reads)


@dataclass(frozen=True, slots=True)
class Policy:
    rules: tuple[DocumentRule, ...] = ()
    keys: Mapping[str, Grant] = field(default_factory=dict)  # by name; ANY_KEY: of those not named
    models: Mapping[str, Grant] = field(default_factory=dict)
    budgets: Mapping[Budget, float] = field(default_factory=dict)  # a day

    def __bool__(self) -> bool:
        return bool(self.rules or self.keys or self.models or self.budgets)

    def of(self, document: DocumentFacts) -> tuple[DocumentRule, ...]:
        return tuple(each for each in self.rules if each.pattern.matches(document))

    def grants(self, key: str | None, model: str) -> tuple[Grant, ...]:
        """What holds for a request. key: its key's name, "" for one without; None: it has no key, and is the owner's
        own."""
        of_key = None if key is None else self.keys.get(key) or self.keys.get(ANY_KEY)
        return tuple(each for each in (of_key, self.models.get(model)) if each is not None)


# ---- the decision ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cause:
    """Something that lets an answer have no less strict a level than this."""

    level: Privacy
    rule: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The level of an answer."""

    level: Privacy
    rule: str = ""  # that decided it; empty: the request's own level holds
    holds: Privacy = "open"  # for what is written: also in later answers that go on from it
    asks: tuple[tuple[str, str], ...] = ()  # (id, name) of documents that were not read, as nobody has confirmed them

    @property
    def why(self) -> str:
        """The end of a reason; empty where no rule decided."""
        return f"a rule holds it to '{self.level}' ({self.rule})" if self.rule else ""

    def narrowed(self, causes: Sequence[Cause], side: Side, *, holds: bool = False) -> Decision:
        """With further causes. holds: they are of what the answer is written from."""
        level, rule, held = self.level, self.rule, self.holds
        for cause in causes:
            least = cause.level
            if side == "cloud" and least == "answer-private":
                least = "local-only"  # the conversation is there, so no less than all of it can be kept
            held = strictest(held, least) if holds else held
            if (
                least != "open"
                and PRIVACY_LEVELS.index(least) >= PRIVACY_LEVELS.index(level)
                and (least != level or not rule)
            ):
                level, rule = least, cause.rule
        return replace(self, level=level, rule=rule, holds=held)


def causes_of(rules: Iterable[DocumentRule]) -> list[Cause]:
    """Of the rules of the documents that an answer is written from."""
    return [Cause(HIGHEST[each.rule], str(each)) for each in dict.fromkeys(rules) if HIGHEST[each.rule] != "open"]


def used_up(budgets: Mapping[Budget, float], used: Mapping[Budget, float]) -> list[Budget]:
    return [name for name, most in budgets.items() if used.get(name, 0.0) >= most]


LEAVES: Final[Mapping[Privacy, str]] = {
    "open": "the conversation, the answer, and predictions from private documents",
    "document-private": "the conversation and the answer",
    "answer-private": "the search query",
    "local-only": "nothing",
}


# ---- texts that a rule holds, known by their letters ----------------------------------------------------------------
PIECE: Final = 32  # letters and digits of a text that are marked together: any quotation of twice as many is recognised
_OTHERS: Final = re.compile(r"[\W_]+")


def letters(text: str) -> str:
    """The letters and digits of a text, however it is set and its accents are written: those are left out."""
    return _OTHERS.sub("", unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold()))


def pair_letters(question: str, answer: str) -> str:
    """Those of a question and a short answer."""
    return "\0".join(letters(text) or text.strip() for text in (question, answer))
