"""From tokens to text that is final: whole characters, nothing that may yet turn out to begin a stop string."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.sampling.dist import Dist
from paceline.core.sampling.text import Detokenizer, StopStrings
from paceline.engine.base import TextModel
from paceline.runtime.service import TokenLogprob


class AnswerText:
    """The text of one answer. Once a stop string was found, what follows is dropped."""

    def __init__(self, tokenizer: TextModel, stops: Sequence[str]) -> None:
        self._detokeniser = Detokenizer(tokenizer.token_bytes)
        self._stops = StopStrings(tuple(stops))

    def push(self, token: int) -> tuple[str, bool]:
        """(text that is final now, whether a stop string ended the answer)."""
        return self._stops.push(self._detokeniser.push(token))

    def flush(self) -> tuple[str, bool]:
        """What was held back, at the end of the answer. Half a character is dropped."""
        text, stopped = self._stops.push(self._detokeniser.flush())
        return (text, True) if stopped else (text + self._stops.flush(), False)


def token_strings(tokenizer: TextModel, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """What each token of a raw prompt stands for in its text; special tokens by their names."""
    return tuple(tokenizer.token_bytes(token) or tokenizer.token_name(token).encode() for token in tokens)


def token_logprob(tokenizer: TextModel, token: int, prob: float, mass: float) -> TokenLogprob:
    """`prob` out of `mass`. A token of no probability has OpenAI's stand-in for minus infinity."""
    logprob = min(math.log(prob / mass), 0.0) if prob > 0.0 else -9999.0
    return TokenLogprob(tokenizer.token_name(token), logprob, tuple(tokenizer.token_bytes(token)))


def logprobs_of(
    tokenizer: TextModel, token: int, dist: Dist, top: int
) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """The chosen token and the `top` most probable ones, of the distribution it was chosen from."""
    mass = float(dist.probs.sum())
    chosen = token_logprob(tokenizer, token, dist.prob(token), mass)
    return chosen, tuple(token_logprob(tokenizer, other, prob, mass) for other, prob in dist.top(top))
