"""GELATO's inner loop: a leaky bucket of entropy, which stops a chain of drafts where the draft model is unsure.

Each draft's entropy flows in, a constant amount leaks out (eq. 12); where the bucket runs over, drafting stops
(eq. 13). The gate looks at the distribution before a token is drawn from it, so what it decides depends on no drafted
token of that row, which the exactness of accept-or-reject verification needs (specs 7.2), and costs no forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.core.sampling.dist import Dist

ACCEPTANCE_SLOPE: Final = 0.35  # 1/nat: acceptance is about exp(-0.35 H) in the paper (eq. 10)
LEAST_ACCEPTANCE: Final = 0.9  # ρ0: drafts less likely to be accepted fill the bucket
OVERFLOW: Final = 1.2  # capacity ÷ leak (Θ_th ÷ H_th)


def entropy(dist: Dist) -> float:
    """Entropy in nats. The tail of a sparse distribution counts as one token, so the value is a lower bound."""
    probs = dist.probs[dist.probs > 0.0]
    total = -float(np.dot(probs, np.log(probs)))
    return total - dist.tail * math.log(dist.tail) if dist.tail > 0.0 else total


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Leak and capacity of the bucket, nats."""

    leak: float  # H_th
    capacity: float  # Θ_th

    @staticmethod
    def of(
        slope: float = ACCEPTANCE_SLOPE, least_acceptance: float = LEAST_ACCEPTANCE, overflow: float = OVERFLOW
    ) -> GateLimits:
        """The leak is the entropy at which acceptance, exp(-slope · H), is the least that is wanted (eq. 11)."""
        leak = -math.log(least_acceptance) / slope
        return GateLimits(leak, overflow * leak)


class EntropyGate:
    """The bucket of one chain."""

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._level = 0.0

    def admits(self, nats: float) -> bool:
        """Let the entropy of the next draft's distribution flow in. False: draft no further; call no more."""
        self._level = max(0.0, self._level + nats - self._limits.leak)
        return self._level <= self._limits.capacity
