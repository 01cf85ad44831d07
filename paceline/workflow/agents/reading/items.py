"""One item of a list that a model writes: without its bullet, number, label and quotes.

Models are asked for one item a line. They also write headings, lists in one line, JSON and fences of code.
"""

from __future__ import annotations

import re
from typing import Final

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
