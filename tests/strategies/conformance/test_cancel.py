"""An answer that its client does not want any more."""

from __future__ import annotations

from paceline.strategies.base import Side, Strategy
from tests.strategies.cases import Manner
from tests.strategies.conformance.laws import check_cancel, every_manner
from tests.strategies.conformance.worlds import IN_ORDER, REORDERING


@every_manner(part=(0, 2), networks=True)
def test_cancelled_at_any_step_everything_is_released(
    strategy: Strategy, manner: Manner, front: Side, reorders: bool
) -> None:
    """At every tenth step, over a link in order at every thirtieth."""
    if reorders:
        check_cancel(strategy, manner, front, REORDERING)
    else:
        check_cancel(strategy, manner, front, IN_ORDER, every=30)
