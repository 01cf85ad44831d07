"""StepExecutor: chunked segments, cancellation, engine errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from paceline.core.batching.pending import Group
from paceline.core.batching.segment import ROOT, Batch, GoesOn, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import NOT_SAMPLED, RowSampling, SampledRow, SamplingParams
from paceline.engine.base import DenseLogits, Output, SampleRequest
from paceline.engine.fake import FakeEngine
from paceline.errors import EngineError, EngineLost
from paceline.runtime.engine_loop.executor import StepExecutor
from paceline.runtime.engine_loop.requests import ForwardRequest, Rows, SequenceOp, StoredPrefix

Result = tuple[Dist, ...] | EngineError
PROMPT = tuple(b"a prompt that is longer than a step may be")


class Faulty(FakeEngine):
    """Raises what `fault` returns for a batch and the number of its forward, from 1 on."""

    calls = 0
    fault: Callable[[Batch, int], Exception | None] = staticmethod(lambda *_: None)

    def forward(self, batch: Batch) -> Output:
        self.calls += 1
        if (error := self.fault(batch, self.calls)) is not None:
            raise error
        return super().forward(batch)


def run_all(steps: StepExecutor) -> None:
    while (scheduled := steps.next()) is not None:
        for answer, result in steps.run(scheduled):
            answer(result)
        steps.engine.check()


def ask(
    steps: StepExecutor, seq: int, start: int, tokens: tuple[int, ...], results: list[Result] | None = None
) -> list[Result]:
    """Its results, when they come. results: where they are appended."""
    results = [] if results is None else results
    steps.submit(ForwardRequest(Segment(SeqId(seq), start, tokens), results.append))
    return results


def dist_of(result: Result) -> Dist:
    assert not isinstance(result, EngineError), result
    return result[-1]


def test_a_chunked_prefill_gives_the_same_dists_as_a_whole_one() -> None:
    whole = ask(steps := StepExecutor(FakeEngine()), 1, 0, PROMPT)
    run_all(steps)
    cut = ask(steps := StepExecutor(FakeEngine(), 8), 1, 0, PROMPT)
    run_all(steps)
    assert steps.steps > 3 and steps.rows == len(PROMPT)
    assert (dist_of(cut[0]).probs == dist_of(whole[0]).probs).all()


def test_a_segment_truncated_before_it_ran_is_never_answered() -> None:
    steps = StepExecutor(FakeEngine())
    first = ask(steps, 1, 0, PROMPT)
    run_all(steps)
    void = ask(steps, 1, len(PROMPT), (65,))
    steps.submit(SequenceOp.truncate(SeqId(1), len(PROMPT)))
    run_all(steps)
    assert len(first) == 1 and not void and steps.idle
    assert steps.engine.length(SeqId(1)) == len(PROMPT)


def grow(
    steps: StepExecutor,
    start: int,
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    results: list[Result],
    ids: tuple[int, ...] | None = None,
) -> None:
    steps.submit(ForwardRequest(Segment(SeqId(1), start, tokens, parents, "all", ids), results.append))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_prune_runs_after_earlier_forwards_and_cancels_none(at_once: bool) -> None:
    steps, results = StepExecutor(FakeEngine()), list[Result]()

    def turn() -> None:
        if not at_once:
            run_all(steps)

    start = len(PROMPT)
    ask(steps, 1, 0, PROMPT, results)
    turn()
    grow(steps, start, (65, 66), (-1, 0), results)
    turn()
    grow(steps, start + 2, (67, 68), (0, 2), results, ids=(2, 3))
    turn()
    steps.submit(SequenceOp.prune(SeqId(1), (0, 2), (3,)))  # 65, 67; 68 stays open
    turn()
    grow(steps, start + 3, (69,), (3,), results, ids=(4,))
    turn()
    steps.submit(SequenceOp.prune(SeqId(1), (3,)))
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
    steps.submit(SequenceOp.prune(SeqId(1), (0,)))
    steps.submit(SequenceOp.truncate(SeqId(1), 1))
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert steps.idle and not results and steps.engine.length(SeqId(1)) == 0


def test_a_failed_step_fails_its_segments_and_those_after_them_only() -> None:
    steps = StepExecutor(FakeEngine())
    bad: list[Result] = []
    grow(steps, 5, (65, 66), (-1, 0), bad)  # rows 0 to 4 were never written
    steps.submit(SequenceOp.prune(SeqId(1), (0,)))  # is dropped
    later = ask(steps, 1, 6, (66,))
    run_all(steps)
    good = [ask(steps, seq, 0, PROMPT) for seq in (1, 2)]
    run_all(steps)
    assert [type(result) for result in (*bad, *later)] == [EngineError, EngineError]
    assert all(dist_of(result).probs.sum() > 0.99 for (result,) in good)


def test_a_segment_that_waits_for_memory_runs_after_a_release() -> None:
    steps = StepExecutor(FakeEngine(capacity_rows=64))
    first = ask(steps, 1, 0, PROMPT)
    run_all(steps)
    second = ask(steps, 2, 0, PROMPT)
    assert steps.next() is None and not steps.idle
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert dist_of(first[0]).probs.tolist() == dist_of(second[0]).probs.tolist()


def test_a_segment_that_can_never_fit_fails_with_a_sentence() -> None:
    steps = StepExecutor(FakeEngine(capacity_rows=16))
    results = ask(steps, 1, 0, PROMPT)
    run_all(steps)
    assert isinstance(results[0], EngineError) and "memory" in str(results[0])


def test_of_a_tree_whose_path_alone_is_read_only_that_path_is_sampled() -> None:
    vocab = FakeEngine().info.vocab_size

    def tokens_of(tokens: tuple[int, ...], parents: tuple[int, ...], *, path_only: bool) -> list[int]:
        steps, results = StepExecutor(FakeEngine()), list[Rows | EngineError]()
        steps.submit(ForwardRequest(Segment(SeqId(1), 0, PROMPT), results.append))
        rows = tuple(RowSampling(SamplingParams(temperature=0.0), row, vocab) for row in range(len(tokens)))
        tree = Segment(SeqId(1), len(PROMPT), tokens, parents, "all")
        steps.submit(ForwardRequest(tree, results.append, sampling=rows, path_only=path_only))
        run_all(steps)
        found = results[-1]
        assert not isinstance(found, EngineError)
        return [row.token for row in found if isinstance(row, SampledRow)]

    (best,) = tokens_of((65,), (ROOT,), path_only=False)
    tree = (65, (best + 1) % 256, best), (ROOT, 0, 0)
    every = tokens_of(*tree, path_only=False)
    assert tokens_of(*tree, path_only=True) == [every[0], NOT_SAMPLED.token, every[2]]


def test_an_engine_fault_fails_the_step_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    steps = StepExecutor(engine := Faulty())
    engine.fault = lambda batch, _: ZeroDivisionError("a bug") if batch.segments[0].seq == 1 else None
    bad = ask(steps, 1, 0, PROMPT)
    run_all(steps)
    good = ask(steps, 2, 0, PROMPT)
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


def test_a_step_that_is_refused_is_halved() -> None:
    steps = StepExecutor(engine := Faulty())
    engine.fault = lambda batch, _: EngineError("out of memory") if len(batch.segments) > 2 else None
    results = [ask(steps, seq, 0, PROMPT) for seq in range(1, 9)]
    run_all(steps)
    assert all(dist_of(answer[0]).probs.sum() > 0.99 for answer in results)
    assert engine.calls == 1 + 2 + 4  # of 8, 4 and 2 segments


def test_a_lost_engine_fails_everything_and_a_fault_only_its_step() -> None:
    """Faults alone never count as a lost engine: a client could end the program with requests that cause them."""

    steps = StepExecutor(engine := Faulty())
    engine.fault = lambda *_: ZeroDivisionError("a bug")
    for seq in range(1, 20):
        failed = ask(steps, seq, 0, PROMPT)
        run_all(steps)
        assert isinstance(failed[0], EngineError) and steps.lost is None
    engine.fault = lambda *_: EngineLost("the GPU has failed")
    results = [ask(steps, seq, 0, PROMPT) for seq in range(20, 25)]
    run_all(steps)
    assert isinstance(steps.lost, EngineLost)
    late = ask(steps, 99, 0, PROMPT)
    run_all(steps)
    assert all(isinstance(answer[0], EngineLost) and len(answer) == 1 for answer in (*results, late))
    steps.submit(SequenceOp.release(SeqId(1)))
    assert steps.next() is None


def test_distributions_that_cannot_be_read_fail_their_request(caplog: pytest.LogCaptureFixture) -> None:
    """A GPU's fault in a forward may show first when its results are copied."""

    class Unreadable(DenseLogits):
        def dists(self) -> tuple[Dist, ...]:
            raise RuntimeError("CUDA error")

    class Late(FakeEngine):
        def forward(self, batch: Batch) -> Output:
            return Output(tuple(Unreadable(dists) for dists in super().forward(batch).dists))

    steps = StepExecutor(Late())
    answer = ask(steps, 1, 0, PROMPT)
    run_all(steps)
    assert isinstance(answer[0], EngineError) and "CUDA error" in str(answer[0])
    assert "could not be read" in caplog.text


# ---- preemption -----------------------------------------------------------------------------------------------------
def short_steps() -> StepExecutor:
    """An executor whose memory holds one prompt and a few rows beside it."""
    return StepExecutor(FakeEngine(capacity_rows=len(PROMPT) + 8))


def ask_in(
    steps: StepExecutor, group: int, start: int, tokens: tuple[int, ...], results: list[Result], **more: object
) -> None:
    """Ask in a group, of which the one with the smaller number is served first."""
    segment = Segment(SeqId(group), start, tokens)
    request = ForwardRequest(segment, results.append, group=Group(group, len(PROMPT) + 8, ("link", group)), **more)  # type: ignore[arg-type]  # fields of it
    steps.submit(request)


@pytest.mark.parametrize("change", ["truncate", "prune", "release"])
def test_a_preempted_sequence_changes_as_if_it_had_its_rows(change: str) -> None:
    expected: list[Result] = []
    found: list[Result] = []
    for steps, results in ((StepExecutor(FakeEngine()), expected), (short_steps(), found)):
        ask_in(steps, 2, 0, PROMPT, [])
        tree = Segment(SeqId(2), len(PROMPT), (65, 66, 67), (-1, 0, 0), "all")
        steps.submit(ForwardRequest(tree, results.append))
        run_all(steps)
        ask_in(steps, 1, 0, PROMPT, results)
        run_all(steps)
        if change == "prune":
            steps.submit(SequenceOp.prune(SeqId(2), (0,), (2,)))
            grown = Segment(SeqId(2), len(PROMPT) + 2, (68,), (2,), "all", (3,))
            steps.submit(ForwardRequest(grown, results.append))
        elif change == "truncate":
            steps.submit(SequenceOp.truncate(SeqId(2), 10))
            ask(steps, 2, 10, (65,), results)
        else:
            steps.submit(SequenceOp.release(SeqId(2)))
            ask_in(steps, 2, 0, PROMPT[:5], results)
        steps.submit(SequenceOp.release(SeqId(1)))
        run_all(steps)
        steps.check()
        assert steps.idle and steps.scheduler.preemptions == (results is found)
    assert [dist_of(result).probs.tolist() for result in found] == [dist_of(each).probs.tolist() for each in expected]


def test_rows_of_a_stored_prefix_are_imported_again_and_exported_before_they_go() -> None:
    engine = FakeEngine()
    engine.forward(Batch((Segment(SeqId(1), 0, PROMPT[:30]),)))
    rows = engine.export_kv(SeqId(1), PROMPT[:30])
    steps, kept = short_steps(), list[object]()
    ask_in(steps, 2, 0, PROMPT, [], prefix=StoredPrefix(PROMPT[:30], rows))
    run_all(steps)
    ask_in(steps, 1, 0, PROMPT, [], prefix=StoredPrefix(PROMPT[:30], keep=kept.append))
    run_all(steps)
    assert steps.scheduler.preemptions == 1 and steps.rows == 2 * len(PROMPT) - 30 and not kept
    ask_in(steps, 0, 0, PROMPT, [])
    run_all(steps)
    assert len(kept) == 1 and steps.scheduler.preemptions == 2
    for group in (0, 1):
        steps.submit(SequenceOp.release(SeqId(group)))
    before = steps.rows
    ask_in(steps, 2, len(PROMPT), (65,), [])
    run_all(steps)
    assert steps.rows - before == len(PROMPT) - 30 + 1 and steps.idle


def test_an_engine_lost_in_the_first_half_of_a_step_runs_no_second_one() -> None:
    faults = {1: EngineError("out of memory"), 2: EngineLost("the GPU has failed")}
    steps = StepExecutor(engine := Faulty())
    engine.fault = lambda _, call: faults.get(call)
    results = [ask(steps, seq, 0, PROMPT) for seq in (1, 2)]
    run_all(steps)
    assert engine.calls == 2
    assert all(isinstance(answer[0], EngineLost) and len(answer) == 1 for answer in results)


def preempted(steps: StepExecutor, results: list[Result], **more: object) -> None:
    """Run the prompt of sequence 2, then that of sequence 1, for which there is room only without it."""
    for group in (2, 1):
        ask_in(steps, group, 0, PROMPT, results, **more)
        run_all(steps)
    assert steps.scheduler.preemptions == 1 and steps.engine.length(SeqId(2)) == 0


def test_a_truncate_while_rows_are_computed_again() -> None:
    steps, results = StepExecutor(FakeEngine(capacity_rows=len(PROMPT) + 8), 8), list[Result]()
    preempted(steps, results)
    void = ask(steps, 2, len(PROMPT), (65,))
    steps.submit(SequenceOp.release(SeqId(1)))
    scheduled = steps.next()
    assert scheduled is not None and not steps.run(scheduled) and 0 < steps.engine.length(SeqId(2)) < len(PROMPT)
    steps.submit(SequenceOp.truncate(SeqId(2), len(PROMPT) - 1))
    assert steps.idle and steps.engine.length(SeqId(2)) == 0
    ask(steps, 2, len(PROMPT) - 1, PROMPT[-1:], results)
    run_all(steps)
    steps.check()
    assert not void and dist_of(results[2]).probs.tolist() == dist_of(results[0]).probs.tolist()


def test_a_prompt_is_not_waited_for_once_its_sequence_is_preempted() -> None:
    steps, results = StepExecutor(FakeEngine(capacity_rows=len(PROMPT) + 8), 8), list[Result]()
    ask_in(steps, 3, 0, PROMPT, results, salt="owner")
    assert not steps.run(steps.next() or pytest.fail("nothing runs"))
    ask_in(steps, 2, 0, PROMPT, results, salt="owner")  # would wait for the rows of 3, but takes its memory
    run_all(steps)
    assert len(results) == 1 and steps.scheduler.preemptions == 1
    steps.submit(SequenceOp.release(SeqId(2)))
    run_all(steps)
    assert dist_of(results[1]).probs.tolist() == dist_of(results[0]).probs.tolist() and steps.idle


def test_a_refusal_of_rows_to_compute_again_fails_what_waits_for_them() -> None:
    steps, results = StepExecutor(engine := Faulty(capacity_rows=len(PROMPT) + 8)), list[Result]()
    preempted(steps, results)
    ask(steps, 2, len(PROMPT), (65,), results)
    steps.submit(SequenceOp.release(SeqId(1)))
    engine.fault = lambda *_: EngineError("no")
    run_all(steps)
    assert isinstance(results[2], EngineError) and len(results) == 3 and steps.idle
    steps.submit(SequenceOp.release(SeqId(2)))
    assert engine.free_rows() == len(PROMPT) + 8
    steps.check()


# ---- plain answers go on unasked ------------------------------------------------------------------------------------
class Readers:
    """Readers of five sequences, each with choices of its own: most ask for what follows the token sampled last, now
    and then for something else. `slowness`: chance that an answer is not read during a forward."""

    def __init__(self, steps: StepExecutor, seed: int, slowness: float, *, unasked: bool) -> None:
        self.steps, self.slowness, self.rng = steps, slowness, Random(seed)
        self.drawn = {seq: Random(1000 * seed + seq) for seq in range(1, 6)}
        self.rows = dict.fromkeys(self.drawn, 0)  # committed ones
        self.read: dict[int, list[list[int]]] = {seq: [] for seq in self.drawn}
        self.waiting: list[tuple[int, Rows | EngineError]] = []
        if unasked:
            steps.arrivals = lambda: self.deliver(slowness)

    def ask(self, seq: int, tokens: tuple[int, ...], ids: tuple[int, int] | None = None) -> None:
        """ids: of a tree of two, the second below the first; None: a chain."""
        vocab, start = self.steps.engine.info.vocab_size, self.rows[seq]
        parents, count = (None, 1) if ids is None else ((ROOT, ids[0]), len(tokens))
        noise = SamplingParams(temperature=1.0, seed=seq)
        sampling = tuple(RowSampling(noise, start + row, vocab) for row in range(count))
        segment = Segment(SeqId(seq), start, tokens, parents, "last" if ids is None else "all", ids)
        request = ForwardRequest(segment, lambda rows: self.waiting.append((seq, rows)), sampling=sampling)
        request.goes_on = GoesOn(60, frozenset({3}))
        self.rows[seq] += len(tokens) if ids is None else 1
        self.steps.submit(request)

    def deliver(self, slowness: float = 0.0) -> None:
        """In any order of the sequences, as a loop with other work would."""
        answers, self.waiting = self.waiting, []
        for seq, rows in answers:
            if self.rng.random() < slowness:
                self.waiting.append((seq, rows))
            else:
                self._take(seq, rows)

    def _take(self, seq: int, rows: Rows | EngineError) -> None:
        assert not isinstance(rows, EngineError), rows
        self.read[seq].append([row.token for row in rows if isinstance(row, SampledRow)])
        drawn, token = self.drawn[seq], self.read[seq][-1][0]
        if len(self.read[seq]) == 40:
            self.steps.submit(SequenceOp.release(SeqId(seq)))
            return
        match drawn.choices(("same", "another", "shorter", "back", "tree", "anew"), (12, 1, 1, 1, 1, 1))[0]:
            case "same":
                self.ask(seq, (token,))
            case "another":
                self.ask(seq, ((token + 1) % 256,))
            case "shorter":
                self.rows[seq] = max(1, self.rows[seq] - drawn.randrange(3))
                self.steps.submit(SequenceOp.truncate(SeqId(seq), self.rows[seq]))
                self.ask(seq, (token,))
            case "back":
                self.ask(seq, (token,))
                self.rows[seq] -= 1
                self.steps.submit(SequenceOp.truncate(SeqId(seq), self.rows[seq]))
                self.ask(seq, ((token + 2) % 256,))
            case "tree":
                ids = 2 * len(self.read[seq]), 2 * len(self.read[seq]) + 1
                self.ask(seq, (token, 65), ids)
                self.steps.submit(SequenceOp.prune(SeqId(seq), ids[:1]))
            case "anew":
                self.steps.submit(SequenceOp.release(SeqId(seq)))
                self.rows[seq] = 0
                self.ask(seq, (*PROMPT[: drawn.randrange(1, 9)], token))

    def run(self) -> dict[int, list[list[int]]]:
        for seq in self.drawn:
            self.ask(seq, PROMPT[:seq])
        while True:
            scheduled = self.steps.next()
            for answer, rows in () if scheduled is None else self.steps.run(scheduled):
                answer(rows)
            self.steps.check()
            if scheduled is None and not self.waiting:
                return self.read
            self.deliver(0.0 if scheduled is None else self.slowness)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [None, 90])
def test_answers_that_go_on_unasked_are_those_that_were_asked_for(seed: int, capacity: int | None) -> None:
    asked = Readers(StepExecutor(FakeEngine()), seed, 0.0, unasked=False).run()
    steps = StepExecutor(FakeEngine(capacity_rows=capacity))
    assert Readers(steps, seed, (0.0, 0.3, 0.8)[seed % 3], unasked=True).run() == asked
    assert steps.idle and not any(steps.engine.length(SeqId(seq)) for seq in asked)


def test_a_plain_answer_is_computed_ahead_of_its_reader_until_it_ends() -> None:
    steps, results = StepExecutor(FakeEngine()), list[object]()
    steps.arrivals = lambda: None
    steps.submit(plain(steps, 1, 0, PROMPT, results, limit=4))
    run_all(steps)
    for position in range(3):
        assert len(results) == position + 1 and steps.engine.length(SeqId(1)) == len(PROMPT) + position + 1
        before = steps.steps
        steps.submit(plain(steps, 1, len(PROMPT) + position, (token_of(results[-1]),), results, limit=4))
        assert steps.steps == before
        run_all(steps)
    assert len(results) == 4 and steps.engine.length(SeqId(1)) == len(PROMPT) + 3, "nothing follows the last token"


def plain(
    steps: StepExecutor, seq: int, start: int, tokens: tuple[int, ...], results: list[object], limit: int = 1000
) -> ForwardRequest:
    """A greedy forward of an answer that goes on up to this number of tokens."""
    sampling = (RowSampling(SamplingParams(temperature=0.0), len(results), steps.engine.info.vocab_size),)
    request = ForwardRequest(Segment(SeqId(seq), start, tokens), results.append, sampling=sampling)
    request.goes_on = GoesOn(limit, frozenset())
    return request


def token_of(result: object) -> int:
    assert isinstance(result, tuple) and isinstance(result[0], SampledRow), result
    return result[0].token


@pytest.mark.parametrize("another", [False, True])
def test_a_fault_of_what_nobody_asked_for_is_told_to_who_asks_next(another: bool) -> None:
    """Short of memory: else the failed sequence would keep its rows, and everybody wait."""
    steps, first, second = StepExecutor(engine := Faulty(capacity_rows=60)), list[object](), list[object]()
    steps.arrivals = lambda: None
    steps.submit(plain(steps, 1, 0, PROMPT[:35], first))
    for answer, rows in steps.run(steps.next() or pytest.fail("nothing runs")):
        answer(rows)
    engine.fault = lambda _, call: ZeroDivisionError("a bug") if call == 2 else None
    run_all(steps)  # what is begun unasked
    steps.submit(ForwardRequest(Segment(SeqId(2), 0, PROMPT[:30]), second.append))
    steps.submit(plain(steps, 1, 35, (token_of(first[0]), *([65] if another else [])), first))
    run_all(steps)
    assert isinstance(first[1], EngineError) and "a bug" in str(first[1])
    steps.submit(SequenceOp.release(SeqId(1)))
    run_all(steps)
    assert len(second) == 1 and steps.idle and not steps.scheduler.short


def test_rows_that_are_to_be_kept_are_exported_before_a_release_that_comes_during_the_forward() -> None:
    steps, results, kept = StepExecutor(FakeEngine()), list[object](), list[object]()
    steps.arrivals = lambda: None
    steps.submit(plain(steps, 1, 0, PROMPT, results))
    steps.run(steps.next() or pytest.fail("nothing runs"))
    steps.arrivals = lambda: steps.submit(SequenceOp.release(SeqId(2)))
    prefix = StoredPrefix(PROMPT[:30], keep=kept.append)
    steps.submit(ForwardRequest(Segment(SeqId(2), 0, PROMPT), results.append, prefix=prefix))
    run_all(steps)
    assert len(kept) == 1 and steps.engine.length(SeqId(2)) == 0


def test_a_prompt_that_was_shortened_or_is_followed_by_more_does_not_go_on() -> None:
    steps, results = StepExecutor(FakeEngine()), list[object]()
    steps.arrivals = lambda: None
    steps.submit(plain(steps, 1, 0, PROMPT, results))
    steps.submit(SequenceOp.truncate(SeqId(1), 20))
    steps.submit(plain(steps, 2, 0, PROMPT, results))
    steps.submit(ForwardRequest(Segment(SeqId(2), len(PROMPT), (65,)), results.append))
    run_all(steps)
    assert steps.engine.length(SeqId(1)) == 20 and steps.engine.length(SeqId(2)) == len(PROMPT) + 1


def test_an_answer_that_is_asked_for_late_does_not_have_the_size_of_a_later_step() -> None:
    steps, results = StepExecutor(FakeEngine()), list[object]()
    steps.arrivals = lambda: None
    steps.submit(plain(steps, 1, 0, PROMPT, results))
    run_all(steps)
    assert steps.last.rows == 1
    ask(steps, 2, 0, PROMPT)
    run_all(steps)
    assert steps.last.rows == len(PROMPT)
    steps.submit(plain(steps, 1, len(PROMPT), (token_of(results[0]),), results))
    scheduled = steps.next()
    assert scheduled is not None and not scheduled.segments
    assert len(steps.run(scheduled)) == 1 and steps.last.rows == 0
