"""From tokens to text, one token at a time, never half a character.

Works on the bytes a token stands for, because a character's bytes may be spread over tokens. Knows no tokenizer, and
nothing of characters that are joined from several code points: these may come apart between two pieces of text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokeniser:
    """Text of a stream of tokens. Joined, the pieces are the bytes decoded as UTF-8 in one go.

    Bytes that can never become a character (RFC 3629) give U+FFFD as soon as that is certain; a character that is
    merely unfinished is held back, and dropped at the end.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that became complete with this token; often empty."""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        """At the end of the answer: always empty, since what is held is half a character. Ready to begin anew."""
        self._decoder.reset()
        return ""
