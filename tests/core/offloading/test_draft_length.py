"""The outer loop's choice against every other; its bounds: `tests/strategies/draft_verify/test_energy.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.offloading import EnergyQueue, Prediction, choose_length, utility

MOST = 15
shares = st.floats(0.05, 0.99)


def expected_tokens(rho: float, drafts: int) -> float:
    """Equation 6."""
    return drafts + 1.0 if rho == 1.0 else (1.0 - rho ** (drafts + 1)) / (1.0 - rho)


def steps_of(rho: float, draft_s: float, send_s: float, verify_s: float) -> Callable[[int], Prediction]:
    """A device of 12 W that sends with 0.2 W (Table I)."""

    def predict(drafts: int) -> Prediction:
        seconds = drafts * (draft_s + send_s) + verify_s
        return Prediction(expected_tokens(rho, drafts), seconds, drafts * (12.0 * draft_s + 0.2 * send_s))

    return predict


@given(shares, st.floats(0.001, 0.1), st.floats(0.0, 0.5), st.floats(0.01, 0.5), st.floats(0.0, 50.0), st.floats(0, 50))
def test_more_energy_spent_never_drafts_more(
    rho: float, draft_s: float, send_s: float, verify_s: float, backlog: float, further: float
) -> None:
    predict = steps_of(rho, draft_s, send_s, verify_s)
    lengths = [
        choose_length(predict, partial(utility, backlog=each, weight=10.0), least=0, most=MOST)
        for each in (backlog, backlog + further)
    ]
    assert lengths[1] <= lengths[0]


@given(shares, st.floats(0.001, 0.1), st.floats(0.0, 0.5), st.floats(0.0, 5.0))
def test_no_other_number_of_drafts_has_more_utility(rho: float, draft_s: float, send_s: float, backlog: float) -> None:
    predict = steps_of(rho, draft_s, send_s, 0.1)

    def worth(drafts: int) -> float:
        step = predict(drafts)
        return 10.0 * (step.tokens / step.seconds) - backlog * step.joules

    same = partial(utility, backlog=backlog, weight=10.0)
    chosen = choose_length(predict, same, least=1, most=MOST)
    assert all(worth(chosen) > worth(less) for less in range(1, chosen))
    assert all(worth(chosen) >= worth(more) for more in range(chosen, MOST + 1))


def test_equal_utility_takes_the_fewest_drafts_and_none_may_be_best() -> None:
    same = Prediction(2.0, 1.0, 0.0)
    worth = partial(utility, backlog=0.0, weight=1.0)
    assert choose_length(lambda _: same, worth, least=2, most=9) == 2
    useless = steps_of(0.05, 0.1, 0.5, 0.05)
    assert choose_length(useless, worth, least=0, most=9) == 0
    with pytest.raises(ValueError, match="drafts from 3 to 2"):
        choose_length(lambda _: same, worth, least=3, most=2)


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="energy budget of -1"):
        EnergyQueue(-1.0)
