"""Documents in messages, each in a frame, so that what a user has written is told from what was given with it.

Of a conversation that stays here, the last question leaves as a search query: a file in the same message must not. A
frame is text, as models are trained to read it: it outlasts storage, other servers and what front ends make of it.
"""

from __future__ import annotations

from typing import Final

_OPEN: Final = '<document name="'
_NAMED: Final = '">\n'
_CLOSE: Final = "</document>"


def framed(name: str, text: str) -> str:
    """A document as it stands in a message. name: may be empty."""
    quoted = name.replace('"', "'")
    inside = f"{quoted}{_NAMED}{text}".replace(_CLOSE, "</ document>").replace(_OPEN, '< document name="')
    return f"{_OPEN}{inside}\n{_CLOSE}"


def taken_apart(message: str) -> tuple[str, list[str]]:
    """(what stands outside of frames, the text of each document). A frame that does not end lasts to the message's
    end."""
    own, *rest = message.split(_OPEN)
    parts = [part.partition(_CLOSE) for part in rest]
    documents = [text.partition(_NAMED)[2].strip() for text, _, _ in parts]
    return "".join([own, *(behind for _, _, behind in parts)]).strip(), documents
