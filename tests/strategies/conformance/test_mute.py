"""A peer that is mute for a while: a program that is stopped, a link that carries nothing."""

from __future__ import annotations

import pytest

from paceline.strategies.base import Side, Strategy
from tests.strategies.cases import SAMPLINGS, Manner
from tests.strategies.conformance.laws import check_mute, every_manner


@every_manner(with_peer=True, part=(1, 2), fronts=True)
@pytest.mark.parametrize("seconds", [0.7, 1.8], ids=["a pause", "longer"])
def test_a_mute_peer_is_passed_over_and_taken_in_again(
    strategy: Strategy, manner: Manner, front: Side, seconds: float
) -> None:
    check_mute(strategy, manner, front, SAMPLINGS["sampled"], seconds, every=3 if manner == Manner() else 41)
