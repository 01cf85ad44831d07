"""A peer that is lost for good, mute for a while, or back again; and a client that has gone."""

from __future__ import annotations

import pytest

from lab.simulation import Network
from paceline.core.sampling.sampler import SamplingParams
from paceline.strategies.base import Side, Strategy
from tests.depth import DEPTH
from tests.strategies.cases import SAMPLINGS, Manner
from tests.strategies.conformance.laws import (
    check_cancel,
    check_flap,
    check_loss,
    check_mute,
    check_return,
    every_manner,
    seeds_of,
)
from tests.strategies.conformance.worlds import IN_ORDER, REORDERING

GREEDY_AND_SAMPLED = {name: SAMPLINGS[name] for name in ("greedy", "sampled")}


@pytest.mark.slow
@every_manner(part=(1, 2), networks=True, samplings=GREEDY_AND_SAMPLED)
def test_a_peer_lost_for_good_at_any_step_leaves_the_prefix_and_the_front_goes_on(
    strategy: Strategy, manner: Manner, front: Side, sampling: SamplingParams, reorders: bool
) -> None:
    """At every tenth step, each combination at others; at every fourth one in one manner of trees. Over a link in order
    at a third of these."""
    every = 4 if manner == Manner() and sampling.temperature == 1.0 else 10
    every *= 1 if reorders else 3
    check_loss(strategy, manner, front, sampling, REORDERING if reorders else IN_ORDER, every=every)


# ---- a peer that is mute for a while: a program that is stopped, a link that carries nothing ------------------------
@every_manner(with_peer=True, part=(1, 2), fronts=True)
@pytest.mark.parametrize("seconds", [0.7, 1.8], ids=["a pause", "longer"])
def test_a_mute_peer_is_passed_over_and_taken_in_again(
    strategy: Strategy, manner: Manner, front: Side, seconds: float
) -> None:
    check_mute(strategy, manner, front, SAMPLINGS["sampled"], seconds, every=7 if manner == Manner() else 41)


# ---- a link that is lost and comes back -----------------------------------------------------------------------------
@every_manner(networks=True)
def test_a_link_that_flaps_and_may_lose_messages_ends_in_a_whole_answer(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool
) -> None:
    check_flap(strategy, manner, front, SAMPLINGS["sampled"], seeds_of(manner, front, reorders), reorders=reorders)


@every_manner(with_peer=True, part=(0, 2), networks=True)
def test_a_peer_that_returns_is_taken_in_again_and_the_text_stays(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool
) -> None:
    check_return(strategy, manner, front, range(2 * DEPTH), Network((0.03, 0.08), reorders=reorders))


# ---- an answer that its client does not want any more ---------------------------------------------------------------
@every_manner(part=(0, 2), networks=True)
def test_cancelled_at_any_step_everything_is_released(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool
) -> None:
    """At every twentieth step, over a link in order at every sixtieth."""
    if reorders:
        check_cancel(strategy, manner, front, REORDERING, every=20)
    else:
        check_cancel(strategy, manner, front, IN_ORDER, every=60)
