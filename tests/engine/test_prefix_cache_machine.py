"""Sequences that begin with cached rows, grow, branch, are cut and released, in any order: each is what its tokens say.

Memory is short, so that cached blocks are evicted and copied all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from paceline.core.batching.segment import SeqId
from paceline.engine.base import Engine
from paceline.engine.loader import EngineOptions, load_engine
from paceline.errors import EngineError
from tests.engine.trials import assert_same, extend, scratch

ROWS = 12 * 16
BASES = [[(7 * i * i + base * i + base) % 97 for i in range(50)] for base in (1, 2)]
OWNERS = ("ann", "bob")
seqs = st.integers(1, 4).map(SeqId)


def machine(engine: Engine, reference: Engine) -> type[RuleBasedStateMachine]:
    """reference: computes every row of a prompt."""

    class Sequences(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.tokens: dict[SeqId, list[int]] = {}

        @rule(
            seq=seqs,
            base=st.sampled_from(BASES),
            length=st.integers(2, 45),
            own=st.integers(0, 5),
            salt=st.sampled_from(OWNERS),
        )
        def begin(self, seq: SeqId, base: list[int], length: int, own: int, salt: str) -> None:
            if seq in self.tokens:
                return
            wanted = [*base[:length], *range(90, 90 + own)]
            rows = engine.begin(seq, wanted, salt)
            assert 0 <= rows < len(wanted)
            self.tokens[seq] = wanted[:rows]
            self.grow(seq, wanted[rows:])

        def grow(self, seq: SeqId, more: list[int]) -> None:
            try:
                found = extend(engine, seq, more)
            except EngineError:  # memory is short: nothing has changed
                if not self.tokens[seq]:
                    self.release(seq)
                return
            self.tokens[seq] += more
            assert_same(found[-1:], scratch(reference, self.tokens[seq])[-1:])

        @precondition(lambda self: self.tokens)
        @rule(data=st.data(), count=st.integers(1, 20))
        def append(self, data: st.DataObject, count: int) -> None:
            seq = data.draw(st.sampled_from(sorted(self.tokens)))
            at = len(self.tokens[seq])
            self.grow(seq, [(3 * i + at) % 97 for i in range(count)])

        @precondition(lambda self: self.tokens)
        @rule(data=st.data(), keep=st.lists(st.integers(0, 1), max_size=2))
        def draft(self, data: st.DataObject, keep: list[int]) -> None:
            """Two branches of two rows, of which a part of one is kept."""
            seq = data.draw(st.sampled_from(sorted(self.tokens)))
            drafts, branch = [11, 12, 13, 14], data.draw(st.sampled_from([(0, 2), (1, 3)]))
            try:
                extend(engine, seq, drafts, parents=[-1, -1, 0, 1])
            except EngineError:
                return
            kept = branch[: len(keep)]
            engine.prune(seq, kept)
            self.tokens[seq] += [drafts[row] for row in kept]

        @precondition(lambda self: self.tokens)
        @rule(data=st.data())
        def truncate(self, data: st.DataObject) -> None:
            seq = data.draw(st.sampled_from(sorted(self.tokens)))
            length = data.draw(st.integers(1, len(self.tokens[seq])))
            engine.truncate(seq, length)
            del self.tokens[seq][length:]

        @rule(seq=seqs)
        def release(self, seq: SeqId) -> None:
            engine.release(seq)
            self.tokens.pop(seq, None)

        @invariant()
        def lengths_are_as_told(self) -> None:
            engine.check()
            for seq, tokens in self.tokens.items():
                assert engine.length(seq) == len(tokens)

        def teardown(self) -> None:
            for seq in list(self.tokens):
                engine.release(seq)
            engine.check()
            assert engine.free_rows() == ROWS

    return Sequences


def test_sequences_are_what_their_tokens_say(checkpoint: Callable[[str], Path], load: Callable[[str], Engine]) -> None:
    options = EngineOptions(backend="paged", dtype="float32", kv_rows=ROWS)
    engine = load_engine(checkpoint("llama"), options, name="short")
    limits = settings(
        max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(machine(engine, load("paged-llama")), settings=limits)
