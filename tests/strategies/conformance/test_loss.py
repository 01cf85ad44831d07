"""A peer that is lost for good."""

from __future__ import annotations

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import Side, Strategy
from tests.strategies.cases import SAMPLINGS, Manner
from tests.strategies.conformance.laws import check_loss, every_manner
from tests.strategies.conformance.worlds import IN_ORDER, REORDERING

pytestmark = pytest.mark.slow

GREEDY_AND_SAMPLED = {name: SAMPLINGS[name] for name in ("greedy", "sampled")}


@every_manner(part=(1, 2), networks=True, samplings=GREEDY_AND_SAMPLED)
def test_a_peer_lost_for_good_at_any_step_leaves_the_prefix_and_the_front_goes_on(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, reorders: bool
) -> None:
    """At every tenth step, each combination at others; at every second one in one manner of trees. Over a link in order
    at a third of these."""
    every = 2 if manner == Manner() and sampling.temperature == 1.0 else 10
    every *= 1 if reorders else 3
    check_loss(strategy, manner, front, sampling, REORDERING if reorders else IN_ORDER, every=every)
