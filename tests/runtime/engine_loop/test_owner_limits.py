"""Steps that several share: one key that floods an engine beside another's stream, and whose a step's energy is.

The time of a step is stated, not measured: 5 ms and 0.12 ms a row, by which 64 rows of a flood make a stream's gap 2.5
times as long, as R22 has found it on real processes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from paceline.core.batching.pending import Group
from paceline.core.batching.segment import Segment, SeqId
from paceline.core.energy import Energy
from paceline.core.sampling.dist import Dist
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError
from paceline.runtime.engine_loop.executor import StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, SequenceOp
from tests.runtime.engine_loop.test_executor import run_all

# ---- one key that floods an engine beside another key's stream, in virtual time -------------------------------------
BASE_S, ROW_S = 0.005, 0.00012
PROMPT = tuple(b"What is new in the harbour?")
TOKENS = {"honest": 64, "flood": 8}  # of an answer


@dataclass
class Clients:
    """Keys whose answers are continued as soon as they can be, and asked for again when they end."""

    limited: bool  # False: the executor is never told what steps take
    steps: StepExecutor = field(default_factory=lambda: StepExecutor(FakeEngine()))
    now: float = 0.0  # s
    next_seq: int = 0
    next_group: int = 0
    tokens: dict[str, list[float]] = field(default_factory=dict)  # by key: when each came
    left: dict[int, int] = field(default_factory=dict)  # by group: branches that still write

    def ask(self, owner: str, tokens: int, branches: int = 1) -> None:
        """An answer of so many tokens, in so many branches."""
        self.next_group += 1
        group = Group(self.next_group, 0, owner=owner)
        self.left[group.key] = branches
        for _ in range(branches):
            self.next_seq += 1
            self._forward(group, SeqId(self.next_seq), 0, PROMPT, tokens, branches)

    def _forward(self, group: Group, seq: SeqId, start: int, rows: tuple[int, ...], left: int, branches: int) -> None:
        def answer(result: tuple[object, ...] | EngineError) -> None:
            assert not isinstance(result, EngineError), result
            self.tokens.setdefault(group.owner, []).append(self.now)
            if left > 1:
                token = result[-1].argmax() if isinstance(result[-1], Dist) else 0
                self._forward(group, seq, start + len(rows), (token,), left - 1, branches)
                return
            self.steps.submit(SequenceOp.release(seq))
            self.left[group.key] -= 1
            if not self.left[group.key]:
                self.ask(group.owner, TOKENS[group.owner], branches)

        self.steps.submit(ForwardRequest(Segment(seq, start, rows), answer, group=group))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and (scheduled := self.steps.next()) is not None:
            answers = self.steps.run(scheduled)
            took = BASE_S + ROW_S * self.steps.last.rows
            self.now += took
            if self.limited:
                self.steps.took(took)
            for answer, result in answers:
                answer(result)

    def gaps(self, owner: str, since: float) -> list[float]:
        """Between the tokens of each answer of one branch, s."""
        times, number = self.tokens[owner], TOKENS[owner]
        answers = [times[first : first + number] for first in range(0, len(times), number)]
        return [after - before for answer in answers for before, after in itertools.pairwise(answer) if before >= since]


def beside_flood(*, limited: bool) -> tuple[list[float], float]:
    """Gaps of an honest stream beside a flood, as multiples of a step's time with its row alone; and the flood's tokens
    a second. The flood: 8 requests with `n` = 8 at any time, of 8 tokens each."""
    clients = Clients(limited)
    clients.ask("honest", TOKENS["honest"])
    clients.run(0.5)
    began = clients.now
    for _ in range(8):
        clients.ask("flood", TOKENS["flood"], branches=8)
    clients.run(2.0)
    rate = len(clients.tokens["flood"]) / (clients.now - began)
    clients.steps.check()
    return [gap / (BASE_S + ROW_S) for gap in clients.gaps("honest", began)], rate


def test_one_key_that_floods_slows_anothers_stream_by_half_at_most() -> None:
    before, unlimited = beside_flood(limited=False)
    after, rate = beside_flood(limited=True)
    assert statistics.quantiles(before, n=20)[-1] > 2.4 and max(before) > 5.0, "without limits"
    assert max(after) <= 1.5
    assert rate >= 0.35 * unlimited, "the flood has what it may add: a third of the time"


# ---- the energy of a step is divided among the requests that were in it ---------------------------------------------
class Fixed:
    """Every step takes 12 J."""

    name = "fixed"

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def begin(self) -> None:
        self.begun += 1

    def end(self, segments: Sequence[Segment]) -> Energy:
        assert segments
        self.ended += 1
        return Energy(12.0)


def asked(steps: StepExecutor, seq: int, rows: int) -> ForwardRequest:
    request = ForwardRequest(Segment(SeqId(seq), 0, (65,) * rows), lambda _: None)
    steps.submit(request)
    return request


def test_a_shared_batch_is_divided_by_rows() -> None:
    steps = StepExecutor(FakeEngine(), meter=Fixed())
    small, large = asked(steps, 1, 1), asked(steps, 2, 5)
    run_all(steps)
    assert (small.energy.joules, large.energy.joules) == (pytest.approx(2.0), pytest.approx(10.0))
    assert small.energy.measured


def test_a_prompt_in_chunks_has_the_energy_of_all_its_steps() -> None:
    meter = Fixed()
    steps = StepExecutor(FakeEngine(), 8, meter)
    request = asked(steps, 1, 20)
    run_all(steps)
    assert request.energy.joules == pytest.approx(12.0 * meter.ended) and meter.ended == meter.begun == 3


def test_what_was_cancelled_is_nobodys_and_no_meter_means_no_energy() -> None:
    steps = StepExecutor(FakeEngine(), 8, Fixed())
    gone, stays = asked(steps, 1, 20), asked(steps, 2, 4)
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert gone.energy.joules == 0.0 and stays.energy.joules == pytest.approx(12.0)
    without = StepExecutor(FakeEngine())
    request = asked(without, 1, 3)
    run_all(without)
    assert request.energy == Energy()
