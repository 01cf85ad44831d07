"""StepExecutor: chunked segments, cancellation, engine errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.row import RowSampling, SampledRow
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Output, SampleRequest
from paceline.engine.fake.engine import FakeEngine
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.executor import MAX_FAULTS, ForwardRequest, SequenceOp, StepExecutor, StepLimits

Result = tuple[Dist, ...] | EngineError
PROMPT = tuple(b"a prompt that is longer than a step may be")


def run_all(steps: StepExecutor) -> None:
    while (scheduled := steps.next()) is not None:
        for answer, result in steps.run(scheduled):
            answer(result)
        steps.engine.check()


def ask(steps: StepExecutor, seq: int, start: int, tokens: tuple[int, ...], results: list[Result]) -> None:
    steps.submit(ForwardRequest(Segment(SeqId(seq), start, tokens), results.append))


def dist_of(result: Result) -> Dist:
    assert not isinstance(result, EngineError), result
    return result[-1]


def test_a_chunked_prefill_gives_the_same_dists_as_a_whole_one() -> None:
    whole: list[Result] = []
    ask(steps := StepExecutor(FakeEngine()), 1, 0, PROMPT, whole)
    run_all(steps)
    cut: list[Result] = []
    ask(steps := StepExecutor(FakeEngine(), StepLimits(8)), 1, 0, PROMPT, cut)
    run_all(steps)
    assert steps.steps > 3 and steps.rows == len(PROMPT)
    assert (dist_of(cut[0]).probs == dist_of(whole[0]).probs).all()


def test_a_segment_truncated_before_it_ran_is_never_answered() -> None:
    steps = StepExecutor(FakeEngine())
    first: list[Result] = []
    void: list[Result] = []
    ask(steps, 1, 0, PROMPT, first)
    run_all(steps)
    ask(steps, 1, len(PROMPT), (65,), void)
    steps.submit(SequenceOp.truncate(SeqId(1), len(PROMPT)))
    run_all(steps)
    assert len(first) == 1 and not void and steps.idle
    assert steps.engine.length(SeqId(1)) == len(PROMPT)


def grow(
    steps: StepExecutor, start: int, tokens: tuple[int, ...], parents: tuple[int, ...], results: list[Result]
) -> None:
    steps.submit(ForwardRequest(Segment(SeqId(1), start, tokens, parents, "all"), results.append))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_commit_runs_after_earlier_forwards_and_cancels_none(at_once: bool) -> None:
    steps, results = StepExecutor(FakeEngine()), list[Result]()

    def turn() -> None:
        if not at_once:
            run_all(steps)

    start = len(PROMPT)
    ask(steps, 1, 0, PROMPT, results)
    turn()
    grow(steps, start, (65, 66), (-1, 0), results)
    turn()
    grow(steps, start + 2, (67, 68), (-1, 0, 0, 2), results)
    turn()
    steps.submit(SequenceOp.commit(SeqId(1), (0, 2), (3,)))  # 65, 67; 68 stays open
    turn()
    grow(steps, start + 3, (69,), (-1, 0), results)
    turn()
    steps.submit(SequenceOp.commit(SeqId(1), (0,)))
    steps.submit(SequenceOp.truncate(SeqId(1), start + 2))  # 68 as well
    turn()
    ask(steps, 1, start + 2, (70,), results)
    run_all(steps)
    assert steps.idle and steps.engine.length(SeqId(1)) == start + 3
    fresh: list[Result] = []
    for tail in ((65,), (65, 67), (65, 67, 68), (65, 67, 68, 69), (65, 67, 70)):
        ask(other := StepExecutor(FakeEngine()), 1, 0, PROMPT + tail, fresh)
        run_all(other)
    first, second, third, last = results[1:]
    assert not any(isinstance(result, EngineError) for result in results)
    found = [first[0], second[0], second[1], third[0], last[0]]  # type: ignore[index]  # no errors, as asserted
    assert [dist.probs.tolist() for dist in found] == [dist_of(result).probs.tolist() for result in fresh]


def test_a_release_runs_at_once_and_cancels_pending_segments() -> None:
    steps, results = StepExecutor(FakeEngine()), list[Result]()
    grow(steps, 0, (65, 66), (-1, 0), results)
    steps.submit(SequenceOp.commit(SeqId(1), (0,)))
    steps.submit(SequenceOp.truncate(SeqId(1), 1))
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert steps.idle and not results and steps.engine.length(SeqId(1)) == 0


def test_operations_after_a_refused_forward_are_dropped() -> None:
    steps, results = StepExecutor(FakeEngine()), list[Result]()
    grow(steps, 5, (65, 66), (-1, 0), results)  # rows 0 to 4 were never written
    steps.submit(SequenceOp.commit(SeqId(1), (0,)))
    run_all(steps)
    ask(steps, 1, 0, PROMPT, results)
    run_all(steps)
    assert isinstance(results[0], EngineError) and dist_of(results[1]).probs.sum() > 0.99


def test_a_failed_step_fails_its_segments_and_those_after_them_only() -> None:
    steps = StepExecutor(FakeEngine())
    bad: list[Result] = []
    later: list[Result] = []
    good: list[Result] = []
    ask(steps, 1, 5, (65,), bad)  # rows 0 to 4 were never written
    ask(steps, 1, 6, (66,), later)
    run_all(steps)
    ask(steps, 2, 0, PROMPT, good)
    run_all(steps)
    assert [type(result) for result in (*bad, *later)] == [EngineError, EngineError]
    assert dist_of(good[0]).probs.sum() > 0.99


def test_a_segment_that_waits_for_memory_runs_after_a_release() -> None:
    steps = StepExecutor(FakeEngine(capacity_rows=64))
    first: list[Result] = []
    second: list[Result] = []
    ask(steps, 1, 0, PROMPT, first)
    run_all(steps)
    ask(steps, 2, 0, PROMPT, second)
    assert steps.next() is None and not steps.idle
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert dist_of(first[0]).probs.tolist() == dist_of(second[0]).probs.tolist()


def test_a_segment_that_can_never_fit_fails_with_a_sentence() -> None:
    steps = StepExecutor(FakeEngine(capacity_rows=16))
    results: list[Result] = []
    ask(steps, 1, 0, PROMPT, results)
    run_all(steps)
    assert isinstance(results[0], EngineError) and "memory" in str(results[0])


def test_an_engine_fault_fails_the_step_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        def forward(self, batch: Batch) -> Output:
            if batch.segments[0].seq == 1:
                raise ZeroDivisionError("a bug")
            return super().forward(batch)

    steps = StepExecutor(Broken())
    bad: list[Result] = []
    good: list[Result] = []
    ask(steps, 1, 0, PROMPT, bad)
    run_all(steps)
    ask(steps, 2, 0, PROMPT, good)
    run_all(steps)
    assert isinstance(bad[0], EngineError) and "a bug" in str(bad[0]) and "a step failed" in caplog.text
    assert dist_of(good[0]).probs.sum() > 0.99


def test_rows_that_cannot_be_sampled_fail_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(FakeEngine):
        def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[SampledRow, ...]]:
            if any(row.position == 13 for request in requests for row in request.rows):
                raise ValueError("no token has a probability above 0")
            return super().sample(requests)

    steps = StepExecutor(Picky())
    results: list[list[object]] = [[] for _ in range(3)]
    for seq, (position, answer) in enumerate(zip((12, 13, 14), results, strict=True), 1):
        sampling = (RowSampling(SamplingParams(), position, steps.engine.info.vocab_size),)
        steps.submit(ForwardRequest(Segment(SeqId(seq), 0, PROMPT), answer.append, sampling=sampling))
    run_all(steps)
    assert isinstance(results[1][0], EngineError) and "unusable" in str(results[1][0])
    assert all(isinstance(answer[0], tuple) for answer in (results[0], results[2]))
    assert "could not be sampled" in caplog.text


class Limited(FakeEngine):
    """Refuses steps of more than two segments, as if memory were short, and counts forwards."""

    calls = 0

    def forward(self, batch: Batch) -> Output:
        self.calls += 1
        if len(batch.segments) > 2:
            raise EngineError("out of memory")
        return super().forward(batch)


def test_a_step_that_is_refused_is_halved() -> None:
    steps = StepExecutor(engine := Limited())
    results: list[list[Result]] = [[] for _ in range(8)]
    for seq, answer in enumerate(results, 1):
        ask(steps, seq, 0, PROMPT, answer)
    run_all(steps)
    assert all(dist_of(answer[0]).probs.sum() > 0.99 for answer in results)
    assert engine.calls == 1 + 2 + 4  # of 8, 4 and 2 segments


@pytest.mark.parametrize("fault", [EngineLost("the GPU has failed"), ZeroDivisionError("a bug")])
def test_a_lost_engine_fails_everything(fault: Exception) -> None:
    """At once where the engine says so; after some steps in a row where it only fails."""

    class Dead(FakeEngine):
        def forward(self, batch: Batch) -> Output:  # noqa: ARG002
            raise fault

    steps = StepExecutor(Dead())
    results: list[list[Result]] = [[] for _ in range(MAX_FAULTS + 2)]
    for seq, answer in enumerate(results, 1):
        ask(steps, seq, 0, PROMPT, answer)
        if isinstance(fault, ZeroDivisionError):
            run_all(steps)
    run_all(steps)
    assert isinstance(steps.lost, EngineLost)
    ask(steps, 99, 0, PROMPT, late := [])
    run_all(steps)
    assert all(isinstance(answer[0], EngineError) and len(answer) == 1 for answer in (*results, late))
    assert isinstance(late[0], EngineLost)
    steps.submit(SequenceOp.release(SeqId(1)))
    assert steps.next() is None
