"""The three aggregators as pure rules: from both sides' laws after one prefix to the target (DRAGON; specs 1.1, 1.6).

A rule says what a side ships of its law (`share`), when that is enough and which token follows (`decide`), and what to
draft (`guesses`). This is where machines find them; each rule has its own module, what they have in common is `shares`.
Knows nothing of trees, epochs or messages; how a share is packed is for `wire.dist_codec` and `wire.tree_codec`.
"""

from __future__ import annotations

from paceline.core.aggregation.aggregator import (
    CLEAR_MARGIN,
    LAST_LEVEL,
    Aggregator,
    AggregatorName,
    PeerDist,
    TargetToken,
    lane_of,
)
from paceline.core.aggregation.coin import Coin
from paceline.core.aggregation.dragon import Dragon
from paceline.core.aggregation.mixture import Mixture
from paceline.core.sampling.sampler import SamplingParams

__all__ = [
    "CLEAR_MARGIN",
    "LAST_LEVEL",
    "Aggregator",
    "AggregatorName",
    "PeerDist",
    "TargetToken",
    "default_aggregator",
    "lane_of",
    "make_aggregator",
]


def make_aggregator(
    name: AggregatorName,
    sampling: SamplingParams,
    *,
    wide: bool = False,
    gamma: float = 0.5,
    vocab_size: int | None = None,
) -> Aggregator:
    """Both sides must make it of the same values.

    wide: distributions are wanted too, for logprobs; of use to `mixture` only. gamma: of `paper`, with what probability
    the cloud's token is picked. vocab_size: spares a side that has no law of its own from asking for the whole row.
    """
    match name:
        case "mixture":
            return Mixture(sampling, wide=wide, vocab_size=vocab_size)
        case "coin":
            return Coin(sampling)
        case "paper":
            return Dragon(sampling, gamma=gamma, vocab_size=vocab_size)


def default_aggregator(sampling: SamplingParams, *, logprobs: bool, seeded: bool) -> AggregatorName:
    """Which rule an answer gets that names none (specs 1.6).

    `coin`, whose messages are smallest and whose drafts are accepted as often, unless that is not what was asked for:
    at temperature 0 the target is the mixture's argmax, which a coin between two argmaxes is not; logprobs need the
    mixture's distribution; top-k, top-p and min-p mean the mixture's head, not each side's; and a seed promises the
    same text as every other strategy gives, the mixture's by common noise. `paper` is only for who asks for it.
    """
    truncates = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    return "mixture" if sampling.temperature == 0.0 or logprobs or seeded or truncates else "coin"
