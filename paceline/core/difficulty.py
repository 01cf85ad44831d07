"""How difficult a question is for a small model, by how sure it was of the tokens that it has written. Pure.

`Reading` takes a row for each token and gives the chance that the small model's whole answer will be as good as that of
a larger one. It costs no forward: a row is the head of a distribution from which a token was sampled anyway. It is a
function of the prompt's length and of those rows, so of the prefix alone: the same prefix is handed over at the same
token, whatever was drafted or came late. Not known: whether the larger model would be right.

Weights are learnt by `lab.training.difficulty` from answers of two models to the same questions. `Correction` moves
them by what came of answers on this machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from paceline.core.sampling.dist import Dist
from paceline.core.side import HandoffLevel

HEAD: Final = 8  # ids of a row that are looked at
HELD: Final = 8  # tokens of which nothing is told before it is known who writes
FADES: Final = 0.75  # of a moving mean, a token


class Glance(NamedTuple):
    """How sure a model was of one token."""

    nats: float  # entropy of the row's head, all other ids as one
    margin: float  # between the two likeliest tokens
    surprise: float  # -log of the token's own probability


def glance(head: Dist, token: int) -> Glance:
    """head: the likeliest ids at temperature 1, before any processing."""
    likeliest = [prob for _, prob in head.top(2)]
    margin = likeliest[0] - (likeliest[1] if len(likeliest) > 1 else 0.0) if likeliest else 0.0
    probability = head.prob(token) or head.tail  # of any that it lacks
    return Glance(head.entropy(), margin, -math.log(min(1.0, max(probability, 1e-9))))


class Features(NamedTuple):
    """What the weights weigh, of an answer so far."""

    prompt: float  # log of its tokens
    tokens: float  # log of the answer's, so far
    nats: float  # mean
    surprise: float  # mean
    doubt: float  # highest moving mean of the nats
    margin: float  # least moving mean of the margins


@dataclass(frozen=True, slots=True)
class Weights:
    bias: float
    of: Features
    agreement: tuple[float, float]  # share of drafts that the larger model takes: where the chance is 0, and 1

    def logit(self, features: Features) -> float:
        return self.bias + sum(weight * value for weight, value in zip(self.of, features, strict=True))

    def expected(self, chance: float) -> float:
        """Share of its drafts that the larger model takes, of an answer with this chance."""
        least, most = self.agreement
        return least + (most - least) * chance


class Reading:
    """One answer of the small model as it grows."""

    def __init__(self, prompt: int) -> None:
        """prompt: tokens of it."""
        self._prompt = math.log1p(prompt)
        self.tokens = 0
        self._nats = self._surprise = 0.0  # sums
        self._moving_nats = self._moving_margin = 0.0
        self._doubt, self._margin = 0.0, 1.0

    def add(self, row: Glance) -> None:
        self.tokens += 1
        self._nats += row.nats
        self._surprise += row.surprise
        fades = min(FADES, 1.0 - 1.0 / self.tokens)  # at first the mean of all
        self._moving_nats += (1.0 - fades) * (row.nats - self._moving_nats)
        self._moving_margin += (1.0 - fades) * (row.margin - self._moving_margin)
        self._doubt = max(self._doubt, self._moving_nats)
        self._margin = min(self._margin, self._moving_margin)

    @property
    def features(self) -> Features:
        number = max(1, self.tokens)
        means = self._nats / number, self._surprise / number
        return Features(self._prompt, math.log1p(self.tokens), *means, self._doubt, self._margin)

    def chance(self, weights: Weights, shift: float = 0.0) -> float:
        """That the answer will be as good as the larger model's. shift: of a `Correction`."""
        return logistic(weights.logit(self.features) + shift)


def logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(value))


@dataclass(frozen=True, slots=True)
class Correction:
    """What answers on this machine have taught, of one pair of models."""

    shift: float = 0.0  # of the logit
    seen: int = 0  # answers

    @staticmethod
    def of(shift: float, seen: int) -> Correction:
        """With what any file may say."""
        return Correction(_bounded(shift), max(0, seen))

    def after(self, chance: float, agreed: float) -> Correction:
        """With one more answer, of which the larger model took this share of the drafts. chance: that was expected of
        it, with this correction."""
        step = max(LEAST_STEP, 1.0 / (FIRST_ANSWERS + self.seen))
        return Correction(_bounded(self.shift + GAIN * step * (agreed - WEIGHTS.expected(chance))), self.seen + 1)


def _bounded(shift: float) -> float:
    return max(-MOST_SHIFT, min(shift, MOST_SHIFT)) if math.isfinite(shift) else 0.0


MOST_SHIFT: Final = 2.0
FIRST_ANSWERS: Final = 10  # that the published weights count for
LEAST_STEP: Final = 0.02  # of an answer, however many there were
GAIN: Final = 4.0  # of the logit, for drafts that are all taken where none was expected to be

# Learnt by `lab.training.difficulty`; `bench handoff` has what they are worth.
WEIGHTS: Final = Weights(0.0, Features(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.6, 0.9))
RISKS: Final[dict[HandoffLevel, float]] = {"quality": 0.2, "balanced": 0.3, "cheap": 0.5}
"""Most risk at which this side writes: that its answer is worse than the larger model's."""
