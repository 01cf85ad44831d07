"""From tokens to final text: whole characters, divided into thinking and answer, without a suffix that may begin a stop
string; logprobs of prompts."""

from __future__ import annotations

import asyncio
import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.batching.segment import Segment
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import Thinking
from paceline.engine.base import TextModel
from paceline.engine.families import Piece, text_parts
from paceline.runtime.engine_loop.requests import SequenceOp
from paceline.runtime.engine_loop.worker import Worker
from paceline.runtime.service import Logprobs, TokenLogprob
from paceline.runtime.units import Turnstile


class StopStrings:
    """Stop string search that holds back any suffix which may begin one, however the text is divided. It ends before
    the stop string that is completed first; of several completed at the same character, before the longest.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self.held = ""
        self.found = ""  # the stop string that was found

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, bool]:
        """(text that is safe to send, whether a stop string has been found). No text is returned after it. may_end:
        False for text that completes none, whatever it says."""
        if self.found:
            return "", True
        before, text = len(self.held), self.held + text
        matches = [
            (at + len(stop), at)
            for stop in (self._stops if may_end else ())
            if (at := text.find(stop, max(before - len(stop) + 1, 0))) >= 0
        ]
        if matches:
            end, at = min(matches)
            self.found, self.held = text[at:end], text[at:]
            return text[:at], True
        keep = self._held_back_length(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back at the end of the answer; none where a stop string has ended it."""
        if self.found:
            return ""
        held, self.held = self.held, ""
        return held

    def _held_back_length(self, text: str) -> int:
        """Length of the longest suffix that is a prefix of a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class AnswerText:
    """Text of one answer. Stop strings are looked for behind its thinking, and text after one is dropped.

    Bytes that can never become a character (RFC 3629) give U+FFFD as soon as that is certain; an unfinished character
    is held back, and dropped at the end. Not handled: grapheme clusters, which may be split between two pieces.
    """

    def __init__(
        self, tokenizer: TextModel, stops: Sequence[str], min_tokens: int = 0, thinking: Thinking | None = None
    ) -> None:
        """min_tokens: that complete no stop string. thinking: that the answer may begin with."""
        self._bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parts = text_parts(thinking)
        self._stops = StopStrings(tuple(stops))
        self._early = min_tokens  # tokens to come of those
        self.length = 0  # characters of all tokens so far, without an incomplete one
        self.may_stop = bool(stops)
        self.thought = 0  # tokens of thinking so far, its marks included

    @property
    def stop(self) -> str:
        """The stop string that ended the answer; empty if none did."""
        return self._stops.found

    @property
    def settled(self) -> int:
        """Characters of the tokens so far that are not held back."""
        return max(0, self.length - len(self._parts.held) - len(self._stops.held))

    @property
    def is_thinking(self) -> bool:
        return self._parts.part == "thinking"

    def push(self, token: int) -> tuple[list[Piece], bool]:
        """Append a token: (text that has become final, whether a stop string ended the answer)."""
        text = self._decoder.decode(self._bytes(token))
        self.length += len(text)
        self._early -= 1
        was_thinking = self.is_thinking
        pieces = self._parts.push(text)
        self.thought += was_thinking or self.is_thinking
        return self._searched(pieces)

    def flush(self) -> tuple[list[Piece], bool]:
        """Text held back, at the end of the answer. An incomplete character is dropped."""
        pieces, stopped = self._searched(self._parts.flush())
        rest = self._stops.flush()
        return [*pieces, *([Piece(rest, thought=False)] if rest else [])], stopped

    def _searched(self, pieces: Sequence[Piece]) -> tuple[list[Piece], bool]:
        """The pieces up to a stop string in the answer."""
        found: list[Piece] = []
        for piece in pieces:
            text, stopped = piece.text, False
            if not piece.thought:
                text, stopped = self._stops.push(text, may_end=self._early < 0)
            if text:
                found.append(Piece(text, piece.thought))
            if stopped:
                return found, True
        return found, False


@dataclass(slots=True)
class Written:
    """State that the stretches of an answer share: the text for the client so far, and how the peer has behaved."""

    text: AnswerText
    tokens: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)  # behind them, within the stop string that has ended the answer
    said: str = ""  # of the answer's text, no more than is compared with a refusal
    # Tokens of no delta yet: characters before each, and its logprobs where they are wanted.
    pending: list[tuple[int, Logprobs | None]] = field(default_factory=list)
    faulty: bool = False  # the peer has broken a rule, and takes no further part
    refusal: str = ""  # why the peer does not take part, in its words
    passed_over: int = 0  # stretches in which the peer was too slow
    left_out: int = 0  # stretches from now on for which it is not asked

    def due(self, *, text: bool, last: bool) -> list[Logprobs | None] | None:
        """Tokens to be told of now; None where there is nothing to be told. A token that may lie within a stop string
        waits. text: there is some as well. last: no more of it follows."""
        waits = self.text.may_stop and not last
        settled = self.text.settled
        number = sum(start < settled for start, _ in self.pending) if waits else len(self.pending)
        tokens = [logprobs for _, logprobs in self.pending[:number]]
        if not text and not any(tokens):
            return None
        del self.pending[:number]
        return tokens

    def drop_stop_string(self) -> None:
        """Forget the tokens whose text lies within the stop string that has ended the answer."""
        length = len(self.tokens) - len(self.pending)
        self.tokens, self.dropped = self.tokens[:length], self.tokens[length:]
        self.pending.clear()

    def is_asked(self) -> bool:
        """True if the peer is to be asked for the next stretch; to be called once for each. One that was too slow is
        left out of one, then of three, of seven, and so on, as each wait is long."""
        if self.faulty or self.refusal:
            return False
        self.left_out -= 1
        return self.left_out < 0

    def pass_over(self) -> None:
        """The peer was too slow in the stretch under way."""
        self.passed_over += 1
        self.left_out = 2**self.passed_over - 1


def is_refusal(said: str, refusals: Sequence[str]) -> bool:
    """said: an answer's text, or more of its beginning than a refusal has."""
    return said.strip().removesuffix(".") in refusals


def token_strings(tokenizer: TextModel, tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Bytes of each token of a raw prompt; the name of a special token."""
    return tuple(tokenizer.token_bytes(token) or tokenizer.token_name(token).encode() for token in tokens)


def token_logprob(tokenizer: TextModel, token: int, prob: float, mass: float) -> TokenLogprob:
    """Log-probability of `prob / mass`; for zero OpenAI's stand-in for minus infinity, -9999."""
    logprob = min(math.log(prob / mass), 0.0) if prob > 0.0 else -9999.0
    return TokenLogprob(tokenizer.token_name(token), logprob, tuple(tokenizer.token_bytes(token)))


def logprobs_of(
    tokenizer: TextModel, token: int, dist: Dist, top: int, *, rest: float = 0.0
) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """Logprobs of the chosen token and of the `top` most probable ones in its distribution. rest: see `Emit`."""
    mass = float(dist.probs.sum()) + rest
    chosen = token_logprob(tokenizer, token, dist.prob(token), mass)
    return chosen, tuple(token_logprob(tokenizer, other, prob, mass) for other, prob in dist.top(top))


PART_BYTES = 1 << 26  # of float64 distributions at once: 55 rows of a vocabulary of 152k
MAX_ROWS = 128


class PromptScorer:
    """Log-probabilities of each token of a prompt given its prefix, on the loop of its worker.

    Scored a few rows at a time, because a row's distribution is as wide as the vocabulary; only the requested logprobs
    are kept. Other sequences run between two parts, and one prompt is scored at a time, of owners in turn.
    """

    def __init__(self, worker: Worker, tokenizer: TextModel, vocab_size: int) -> None:
        """vocab_size: without the ids that pad an engine's vocabulary."""
        self._worker = worker
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._rows = max(1, min(MAX_ROWS, PART_BYTES // (8 * vocab_size)))
        self._turns = Turnstile(1)

    async def score(self, prompt: Sequence[int], top: int, owner: str = "") -> tuple[Logprobs, ...]:
        """Logprobs of all tokens but the first. Cancellation releases the KV rows. Raises EngineError."""
        async with self._turns.turn(owner):
            seq = self._worker.allocate()
            group = self._worker.group(len(prompt) + self._worker.block_size, owner=owner)  # grows part by part
            items: list[Logprobs] = []
            try:
                for start in range(0, len(prompt) - 1, self._rows):
                    rows = tuple(prompt[start : min(start + self._rows, len(prompt) - 1)])
                    dists = await self._worker.compute(Segment(seq, start, rows, logits="all"), group)
                    following = prompt[start + 1 : start + 1 + len(rows)]
                    items += await asyncio.to_thread(self._logprobs, dists, following, top)
            finally:
                self._worker.submit(SequenceOp.release(seq))
            return tuple(items)

    def _logprobs(self, dists: Sequence[Dist], following: Sequence[int], top: int) -> list[Logprobs]:
        return [
            logprobs_of(self._tokenizer, token, dist.within(self._vocab_size), top)
            for dist, token in zip(dists, following, strict=True)
        ]
