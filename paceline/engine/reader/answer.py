"""From readings to next-token distributions: p(next | answer so far).

An answer is one text a part of the question, joined by fixed words: `A; and for the second: B.` The text of a part is
a span of the document, or says that there is none. Where a document does not answer, nearly all of the mass is spread
over the vocabulary, and the sentence that says so has a little: in a mixture the branch that knows then decides, and
only where none does the sentence is the best of all. Pure: knows nothing of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.sampling.dist import Dist, ProbArray

Ids = tuple[int, ...]

NOTHING = "I find no answer to this in the documents"
NOTHING_OF_SEVERAL = "no answer in the documents"
JOINTS = ("; and for the second: ", "; and for the third: ")
REFUSAL = 0.04  # mass of the sentence where a document does not answer: small, as each such branch adds its own
CLOSING = 0.05  # mass of the answer's end after a text that the document does not know
FORGETTING = 0.25  # share of the doubt that remains a token after the first, while a span fits


@dataclass(frozen=True, slots=True)
class Wording:
    """The fixed texts as token ids of the model's vocabulary."""

    vocab_size: int
    plain: ProbArray  # (vocab,) uniform over all tokens but the special ones
    nothing: Ids
    nothing_of_several: Ids
    joints: tuple[Ids, ...]  # each begins with a token that no span holds
    stop: Ids
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a document says of one part of the question: texts with their mass; what is missing to 1 is doubt."""

    texts: tuple[tuple[Ids, float], ...]


def part_of(spans: Sequence[tuple[Ids, float]], answered: float, nothing: Ids, *, alone: bool) -> Part:
    """alone: there is no document, so no other branch can know better."""
    share = 1.0 - CLOSING if alone else REFUSAL
    texts = [(text, answered * prob) for text, prob in spans]
    return Part((*texts, (nothing, (1.0 - answered) * share)))


class Answer:
    """Distributions of one prompt's answer."""

    def __init__(self, parts: Sequence[Part], wording: Wording) -> None:
        self._parts = parts
        self._wording = wording

    def next(self, answer: Ids) -> Dist:
        """Of the token after `answer`; a function of the two alone."""
        wording = self._wording
        number, said = 0, answer
        for joint in wording.joints[: len(self._parts) - 1]:
            at = _find(said, joint)
            if at is None:
                break
            number, said = number + 1, said[at + len(joint) :]
        is_last = number == len(self._parts) - 1
        tail = (*wording.stop, wording.end) if is_last else wording.joints[number]
        if not is_last and (begun := _begun(said, tail)):
            return self._only(tail[begun])
        probs: ProbArray = np.zeros(wording.vocab_size)
        doubt = 1.0
        for text, mass in self._parts[number].texts:
            whole = (*text, *tail)
            doubt -= mass
            if whole[: len(said)] == said and len(whole) > len(said):
                probs[whole[len(said)]] += mass
        known = float(probs.sum())
        if known == 0.0 and said:
            probs[self._closing(said)] = CLOSING
            return Dist.dense(probs + (1.0 - CLOSING) * wording.plain)
        doubt = max(doubt, 1e-6) * FORGETTING ** len(said)
        return Dist.dense((probs + doubt * wording.plain) / (known + doubt))

    def _only(self, token: int) -> Dist:
        probs: ProbArray = 0.001 * self._wording.plain
        probs[token] += 0.999
        return Dist.dense(probs)

    def _closing(self, said: Ids) -> int:
        stop = self._wording.stop
        return self._wording.end if said[-len(stop) :] == stop else stop[0]


def prompt_dist(wording: Wording) -> Dist:
    """Of a row of the prompt, where the reader has nothing to say."""
    return Dist.dense(wording.plain)


def _find(said: Ids, joint: Ids) -> int | None:
    size = len(joint)
    return next((i for i in range(len(said) - size + 1) if said[i : i + size] == joint), None)


def _begun(said: Ids, joint: Ids) -> int:
    """How many tokens of the joint the text ends with."""
    return next((n for n in range(min(len(said), len(joint) - 1), 0, -1) if said[-n:] == joint[:n]), 0)
