"""Log-probabilities of `/v1/completions`: four parallel lists with one entry per token. Pure.

Unlike those of chat they have no field for bytes, so a token that is not valid UTF-8 is named by its bytes,
`bytes:\\xe2\\x82`, as by OpenAI: two alternatives have the same name only if they have the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.runtime.service import Logprobs, TokenLogprob

FLOOR = -9999.0  # OpenAI's number for probability 0; minus infinity is not JSON


@dataclass(slots=True)
class LegacyLogprobs:
    """The entries of consecutive tokens."""

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
        """`top`: number of alternatives requested; `top_logprobs` is null for 0."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if top else None,
            "text_offset": self.text_offset,
        }


class Offsets:
    """Offset of each token in the choice's text, in characters. All tokens of one character have its offset."""

    def __init__(self, start: int = 0) -> None:
        """`start`: below 0 when the first tokens are not part of the text."""
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, data: bytes) -> int:
        """The offset of the next token, whose bytes are `data`."""
        at = self._at
        self._at += len(self._decoder.decode(data))
        return max(at, 0)

    def restart(self, at: int) -> None:
        """Drop an incomplete character, and continue at offset `at`."""
        self._at = at
        self._decoder.reset()


def entries(logprobs: Sequence[Logprobs], offsets: Offsets) -> LegacyLogprobs:
    """Entries of output tokens."""
    result = LegacyLogprobs()
    for chosen, top in logprobs:
        _add(result, chosen, top, offsets.next(bytes(chosen.bytes)))
    return result


def prompt_entries(token_bytes: Sequence[bytes], logprobs: Sequence[Logprobs], offsets: Offsets) -> LegacyLogprobs:
    """Entries of a prompt. Its first token has no probability: null, as lm-evaluation-harness expects.

    `logprobs`: of all tokens but the first.
    """
    first = token_bytes[0]
    result = LegacyLogprobs([_name(first.decode("utf-8", "replace"), first)], [None], [None], [offsets.next(first)])
    for data, (chosen, top) in zip(token_bytes[1:], logprobs, strict=True):
        _add(result, chosen, top, offsets.next(data))
    return result


def _add(result: LegacyLogprobs, chosen: TokenLogprob, top: Sequence[TokenLogprob], offset: int) -> None:
    result.tokens.append(_token(chosen))
    result.token_logprobs.append(max(chosen.logprob, FLOOR))
    alternatives: dict[str, float] = {}
    for one in (*top, chosen):  # `top` may lack the chosen token
        name, logprob = _token(one), max(one.logprob, FLOOR)
        alternatives[name] = max(alternatives.get(name, FLOOR), logprob)
    result.top_logprobs.append(alternatives)
    result.text_offset.append(offset)


def _token(one: TokenLogprob) -> str:
    return _name(one.token, bytes(one.bytes))


def _name(token: str, data: bytes) -> str:
    try:
        data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return token
