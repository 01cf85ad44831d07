"""Random growth, commits and truncations on the fake engine, many more than `test_contract.py` tries on each engine.

They test the sequence table: lengths, positions and paths are compared after every move.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batching.segment import SeqId
from paceline.engine.fake import FakeEngine
from tests.engine.trials import Growing, prompts


@settings(max_examples=80)
@given(prompt=prompts(0, 5), data=st.data())
def test_any_valid_moves_equal_a_fresh_prefill(prompt: list[int], data: st.DataObject) -> None:
    growing = Growing(FakeEngine(seed=5), SeqId(1))
    if prompt:
        growing.extend(prompt)
    growing.play(data, 12)


@settings(max_examples=40)
@given(data=st.data())
def test_sequences_grow_beside_each_other(data: st.DataObject) -> None:
    engine = FakeEngine(seed=6)
    both = [Growing(engine, SeqId(i)) for i in range(2)]
    for _ in range(10):
        both[data.draw(st.integers(0, 1))].play(data, 1)
    for growing in both:
        engine.release(growing.seq)
    assert [engine.length(growing.seq) for growing in both] == [0, 0]
    engine.check()
