"""The log-probabilities of `/v1/completions`: four lists side by side, one entry a token. Pure.

Unlike chat's they hold no bytes, so a token that is no text by itself is named by its bytes, `bytes:\\xe2\\x82`, as
OpenAI does; no two tokens of an alternative then share a name unless they mean the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.runtime.service import Logprobs, TokenLogprob

FLOOR = -9999.0  # OpenAI's number for what cannot happen; minus infinity is not JSON


@dataclass(slots=True)
class LegacyLogprobs:
    """Entries of consecutive tokens, and how to say them."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, more: LegacyLogprobs) -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset

    def json(self, top: int) -> dict[str, object]:
        """`top_logprobs` is null where no alternatives were asked for."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if top else None,
            "text_offset": self.text_offset,
        }


class Offsets:
    """Where each token begins in the choice's text, in characters. A character that is spread over several tokens
    begins at the first of them, and the others begin there too: it stands behind none but the last."""

    def __init__(self, start: int = 0) -> None:
        """`start`: may be below 0, for tokens in front that the text does not show."""
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, data: bytes) -> int:
        """Of the token that stands for these bytes."""
        at = self._at
        self._at += len(self._decoder.decode(data))
        return max(at, 0)

    def restart(self, at: int) -> None:
        """Half a character that is not continued is dropped; what follows begins at `at`."""
        self._at = at
        self._decoder.reset()


def entries(logprobs: Sequence[Logprobs], offsets: Offsets) -> LegacyLogprobs:
    """Of output tokens."""
    said = LegacyLogprobs()
    for chosen, top in logprobs:
        _add(said, chosen, top, offsets.next(bytes(chosen.bytes)))
    return said


def prompt_entries(spelled: Sequence[bytes], logprobs: Sequence[Logprobs], offsets: Offsets) -> LegacyLogprobs:
    """Of a prompt. Its first token follows nothing, so it has no probability: null, as lm-evaluation-harness expects.

    logprobs: of all tokens but the first.
    """
    first = spelled[0]
    said = LegacyLogprobs([_name(first.decode("utf-8", "replace"), first)], [None], [None], [offsets.next(first)])
    for data, (chosen, top) in zip(spelled[1:], logprobs, strict=True):
        _add(said, chosen, top, offsets.next(data))
    return said


def _add(said: LegacyLogprobs, chosen: TokenLogprob, top: Sequence[TokenLogprob], offset: int) -> None:
    said.tokens.append(_token(chosen))
    said.token_logprobs.append(max(chosen.logprob, FLOOR))
    alternatives: dict[str, float] = {}
    for one in (*top, chosen):  # the chosen one too, be it among them or not
        name, logprob = _token(one), max(one.logprob, FLOOR)
        alternatives[name] = max(alternatives.get(name, FLOOR), logprob)
    said.top_logprobs.append(alternatives)
    said.text_offset.append(offset)


def _token(one: TokenLogprob) -> str:
    return _name(one.token, bytes(one.bytes))


def _name(token: str, data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return token
