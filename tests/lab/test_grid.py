"""What `auto` takes is as fast as any other way to the same text: the short form of `python -m lab.grid`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.grid import SITUATIONS, cell
from tests.depth import DEPTH

# Forwards of the side that writes by which an answer may be later: two of a way that is changed, and one more of a side
# that writes ahead, which begins once its prompt is computed for the joint machine.
STEPS = {
    "nothing private: verify 30, draft 60, RTT 50, spread 0.1": 2,
    "nothing private: verify 100, draft 15, RTT 50, spread 0.1": 2,
    "found on the device alone, RTT 300, 30/30": 3,
    "found on the cloud alone, RTT 300, 60/6": 2,
    "2 stages, a draft model, spread 0.1": 2,
}
SHORT = {each.name: each for each in SITUATIONS if each.name in STEPS}


@pytest.mark.parametrize("name", [*STEPS][:: 1 if DEPTH > 1 else 2])
def test_auto_is_as_fast_as_any_way_to_the_text_that_is_owed(name: str) -> None:
    warm = 6 if DEPTH > 1 else 2  # answers before the measured four, as one may differ by three steps
    situation = replace(SHORT[name], answers=warm + 4, warm=warm, tokens=64)
    found = cell(situation)
    step = situation.device if found.text == "device" else situation.cloud
    late = (found.auto - min(found.others.values())) * situation.tokens
    assert found.ratio <= 1.05 or late <= STEPS[name] * step * 1.01, found
