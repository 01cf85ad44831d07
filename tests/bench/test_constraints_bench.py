"""`paceline bench constraints`: real nodes and a real link, and a validation that can fail."""

from __future__ import annotations

import pytest

from bench.constraints import CONCURRENCY, FORMS, judged, linked_nodes
from paceline.strategies.base import Strategy
from paceline.strategies.registry import STRATEGIES

pytestmark = pytest.mark.anyio

RUNS = dict(zip(CONCURRENCY, (2, 6, 12), strict=True))  # by concurrency; the bench itself makes 1,000 of each


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
async def test_every_answer_validates_in_every_strategy(strategy: Strategy) -> None:
    async with linked_nodes() as nodes:
        for at_once, runs in RUNS.items():
            outcome = await judged(nodes, strategy, runs, at_once)
            assert (outcome.runs, outcome.valid) == (runs, runs), f"{at_once} at once"
        assert all(node.num_answers == 0 for node in nodes.values())


def test_the_validation_accepts_only_fitting_answers() -> None:
    person, tree, calls = FORMS
    assert person.holds('{"name": "Ada", "age": 36}') and tree.holds('{"left": {"on": true}}')
    assert calls.holds('<tool_call>\n{"name": "tree", "arguments": {"left": {}}}\n</tool_call>')
    for wrong in ("", "{", "[]", '{"name": "Ada"}', '{"name": "Ada", "age": -1}', '{"left": {"on": 1}}'):
        assert not person.holds(wrong) and not tree.holds(wrong) and not calls.holds(wrong)
    assert not calls.holds('<tool_call>\n{"name": "tree", "arguments": {"right": {}}}\n</tool_call>')
    assert not calls.holds('<tool_call>\n{"name": "wood", "arguments": {"left": {}}}\n</tool_call>')
