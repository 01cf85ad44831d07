"""The three aggregators by name: from both sides' distributions after one prefix to the target (DRAGON; specs 1.1,
1.6).

An aggregator determines what a side sends of its distribution (`to_wire`), when that suffices and which token follows
(`decide`), and what to draft (`draft_tokens`). Each has its own module; `aggregator` holds their interface. Knows
nothing of trees, epochs or messages; `wire.dist_codec` and `wire.payloads.tree_codec` encode what is sent.
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
    needs_dists: bool = False,
    gamma: float = 0.5,
    vocab_size: int | None = None,
) -> Aggregator:
    """The aggregator of one request; both sides must use the same values.

    needs_dists: the target's distribution is needed too, for logprobs; used by `mixture` only. gamma: of `paper`, the
    probability that the cloud's token is picked. vocab_size: saves a side without a distribution of its own from
    requesting the whole row.
    """
    match name:
        case "mixture":
            return Mixture(sampling, needs_dists=needs_dists, vocab_size=vocab_size)
        case "coin":
            return Coin(sampling)
        case "paper":
            return Dragon(sampling, gamma=gamma, vocab_size=vocab_size)


def default_aggregator(sampling: SamplingParams, *, logprobs: bool, seeded: bool) -> AggregatorName:
    """The aggregator of a request that names none (specs 1.6).

    `coin`, whose messages are smallest and whose drafts are accepted as often, unless the request rules it out: at
    temperature 0 the target is the mixture's argmax, which a coin between two argmaxes is not; logprobs need the
    mixture's distribution; top-k, top-p and min-p apply to the mixture, not to each side; and a seed promises the text
    of every other strategy, which is the mixture's with common noise. `paper` must be requested by name.
    """
    filters = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    return "mixture" if sampling.temperature == 0.0 or logprobs or seeded or filters else "coin"
