"""Text of strangers on its way to a log or a terminal: no character of it ends a line or controls a terminal.

A stranger is whoever is not the program itself: the other side of a link, a client, a document, a model.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # C0 and C1 without tab and newline, line ends


def is_text(text: str) -> bool:
    """False for what was given to a program as bytes that are no UTF-8, such as an argument in another encoding."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def printable(text: str) -> str:
    """The text on one line; what cannot be shown becomes a space, so also what changes the direction of writing."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def one_line(text: str, limit: int) -> str:
    """The text, printable, with single blanks, of at most `limit` characters."""
    return " ".join(printable(text[: 4 * limit]).split())[:limit]


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of a text: its beginning and its longer end, where a question usually is, cut at
    blanks."""
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head].rsplit(' ', 1)[0]} {text[-(limit - head - 1) :].split(' ', 1)[-1]}"


def printable_lines(text: str) -> str:
    """The text without what controls a terminal; its lines, tabs and joined characters stay."""
    return _CONTROL.sub("", text)


def printable_json(text: str) -> str:
    """A JSON document whose values are unchanged: control characters that JSON allows as they are become escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
