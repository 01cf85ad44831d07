"""How difficult a question is for a small model, by how sure it was of the tokens that it has written, and what a
larger model would cost. Pure.

`Sureness` takes a row for each token and gives the chance that the small model's whole answer will be as good as that
of a larger one, and how long that one's would be: a risk is worth taking where it would be dear to take away. It costs
no forward: a row is the head of a distribution from which a token was sampled anyway. It is a function of the prompt's
length and of those rows, so of the prefix alone: the same prefix is handed over at the same token, whatever was drafted
or came late. Not known: whether the larger model would be right.

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
MOST_LENGTH: Final = math.log(1e6)  # of an answer


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
class Linear:
    bias: float
    of: Features

    def at(self, features: Features) -> float:
        return self.bias + sum(weight * value for weight, value in zip(self.of, features, strict=True))


@dataclass(frozen=True, slots=True)
class Weights:
    sure: Linear  # logit of the chance
    length: Linear  # log of the tokens of the larger model's whole answer
    agreement: float  # share of its drafts that the larger model takes, a mean of answers


class Look(NamedTuple):
    """Expectations of an answer, behind one of its tokens."""

    chance: float  # that it will be as good as the larger model's
    tokens: float  # that the larger model's would have

    @property
    def risk(self) -> float:
        return 1.0 - self.chance

    @property
    def worth(self) -> float:
        """Risk that each token of the larger model's would take away."""
        return self.risk / self.tokens


class Sureness:
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

    def look(self, weights: Weights, shift: float = 0.0) -> Look:
        """shift: of a `Correction`."""
        features = self.features
        tokens = math.exp(min(weights.length.at(features), MOST_LENGTH))
        return Look(logistic(weights.sure.at(features) + shift), max(1.0, tokens))


def logistic(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else 1.0 - 1.0 / (1.0 + math.exp(value))


@dataclass(frozen=True, slots=True)
class Correction:
    """What answers on this machine have taught, of one pair of models: how often the larger one takes a draft.

    Models that always agree are as good as each other. Of single answers that share tells nothing (`bench/LOG.md`), so
    only its mean moves the chances: by the logarithm of its odds, against those of the pair that was learnt from.
    """

    agreed: float  # mean share of drafts that were taken
    seen: int = 0  # answers

    @staticmethod
    def of(agreed: float, seen: int) -> Correction:
        """With what any file may say."""
        return Correction(min(max(agreed, 0.0), 1.0) if math.isfinite(agreed) else WEIGHTS.agreement, max(0, seen))

    def after(self, agreed: float) -> Correction:
        """With one more answer."""
        step = max(LEAST_STEP, 1.0 / (FIRST_ANSWERS + self.seen))
        return Correction(self.agreed + step * (agreed - self.agreed), self.seen + 1)

    @property
    def shift(self) -> float:
        """Of the logit of a chance."""
        shift = _logit(self.agreed) - _logit(WEIGHTS.agreement)
        return max(-MOST_SHIFT, min(shift, MOST_SHIFT))


def _logit(share: float) -> float:
    share = min(max(share, 1e-6), 1.0 - 1e-6)
    return math.log(share / (1.0 - share))


MOST_SHIFT: Final = 2.0
FIRST_ANSWERS: Final = 10  # that the published mean counts for
LEAST_STEP: Final = 0.01  # of an answer, however many there were

# Learnt by `lab.training.difficulty`; `bench handoff` has what they are worth.
WEIGHTS: Final = Weights(
    sure=Linear(1.5607, Features(0.4742, -0.2046, -1.4958, -1.31, -0.723, 1.1597)),
    length=Linear(5.7787, Features(-0.4517, 0.474, -1.0179, 1.0883, -0.8489, -0.2054)),
    agreement=0.851,
)
WORTHS: Final[dict[HandoffLevel, float]] = {"quality": 0.00309, "balanced": 0.00653, "cheap": 0.0115}
"""Where a token of the larger model's is worth more than this, in risk that it takes away, it writes."""
UNTAUGHT: Final = Correction(WEIGHTS.agreement)
