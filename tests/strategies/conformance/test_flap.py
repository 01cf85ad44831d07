"""A link that is lost and comes back."""

from __future__ import annotations

from lab.simulation import Network
from paceline.strategies.base import Side, Strategy
from tests.depth import DEPTH
from tests.strategies.cases import SAMPLINGS, Manner
from tests.strategies.conformance.laws import QUICK, check_flap, check_return, every_manner


@every_manner(networks=True)
def test_a_link_that_flaps_and_may_lose_messages_ends_in_a_whole_answer(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool
) -> None:
    check_flap(strategy, manner, front, SAMPLINGS["sampled"], range(QUICK * DEPTH), reorders=reorders)


@every_manner(with_peer=True, part=(0, 2), networks=True)
def test_a_peer_that_returns_is_taken_in_again_and_the_text_stays(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool
) -> None:
    check_return(strategy, manner, front, range(2 * DEPTH), Network((0.03, 0.08), reorders=reorders))
