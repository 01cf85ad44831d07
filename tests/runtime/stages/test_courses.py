"""A pipeline of stages: several batches under way, prunes that overtake them, stages that fail."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import Engine, Output, SampleRequest, Ticket
from paceline.engine.loader import EngineOptions
from paceline.engine.stage import Stage, StageOutput, rows_from_bytes, rows_to_bytes
from paceline.errors import EngineError
from paceline.runtime.stages.pipeline import RemotePipeline
from paceline.runtime.stages.stage_worker import LastRows
from paceline.wire.messages import Frame
from paceline.wire.stages.messages import ROW_FORMATS, PruneRows, RowFormat, SampledRows, SampleRows, Wanted
from tests.engine.late_segments import Sender
from tests.engine.trials import assert_same, scratch
from tests.runtime.stages.rig import DEMO, Rig, chain, even_spans, rig

OPTIONS = EngineOptions(dtype="float32", kv_rows=512)
WAIT_S = 60


@pytest.fixture
def made() -> Iterator[Rig]:
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        yield made


@pytest.fixture
def pipeline(made: Rig) -> RemotePipeline:
    return made.pipeline


def spans(made: Rig) -> list[Stage]:
    return [each.server.worker.stage for each in made.stages if each.server.worker.stage is not None]


class Gate:
    """Holds a stage before its next forward, and counts the rows it computes."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.rows: list[int] = []
        self._forward = stage.forward
        monkeypatch.setattr(stage, "forward", self)

    def __call__(self, batch: Batch, hidden: Tensor | None = None) -> StageOutput:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        before = self._forward(batch, hidden)
        self.rows.append(before.batch.num_rows)
        return before


def test_batches_run_beside_each_other_and_their_results_come_in_order(
    made: Rig, pipeline: RemotePipeline, whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(spans(made)[1], monkeypatch)
    ready: list[None] = []
    pipeline.notify(lambda: ready.append(None))
    # the first sequence's second batch needs nothing of the first one's result
    batches = [chain(1, 0, (1, 2, 3)), chain(2, 0, (4, 5)), chain(1, 3, (6, 7)), chain(2, 2, (8,))]
    tickets = [pipeline.submit(batch) for batch in batches]
    assert pipeline.length(SeqId(1)) == 5 and pipeline.free_rows() == 512 - 32
    assert gate.entered.wait(WAIT_S) and not pipeline.is_ready(tickets[0]) and not ready
    gate.open.set()
    found = [pipeline.collect(ticket).dists[0] for ticket in tickets]
    assert_same([*found[0], *found[2]], scratch(whole, (1, 2, 3, 6, 7)))
    assert_same([*found[1], *found[3]], scratch(whole, (4, 5, 8)))
    pipeline.check()
    assert len(ready) == 4
    for seq in (1, 2):
        pipeline.release(SeqId(seq))
    pipeline.check()
    assert pipeline.free_rows() == 512 and [stage.free_rows() for stage in spans(made)] == [512, 512]


def test_rows_dropped_by_a_prune_are_not_computed_by_stages_they_have_not_reached(
    made: Rig, pipeline: RemotePipeline, whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq = SeqId(1)
    pipeline.collect(pipeline.submit(chain(1, 0, (9, 8, 7))))
    gate = Gate(spans(made)[1], monkeypatch)
    first = pipeline.submit(Batch((Segment(seq, 3, (1, 2, 3), (-1, -1, 0), "all"),)))
    second = pipeline.submit(Batch((Segment(seq, 6, (4, 5, 6), (1, 2, 4), "all", (3, 4, 5)),)))
    other = pipeline.submit(Batch((Segment(seq, 9, (7,), (1,), "all", (6,)), Segment(SeqId(2), 0, (3, 4)))))
    assert gate.entered.wait(WAIT_S)
    worker, pruned = made.stages[1].server.worker, threading.Event()
    put = worker.put

    def noticed(message: Frame) -> None:
        put(message)
        if isinstance(message, PruneRows):
            pruned.set()

    monkeypatch.setattr(worker, "put", noticed)
    pipeline.prune(seq, (0, 2), (4, 5), horizon=6)  # the target has taken the first branch
    assert pruned.wait(WAIT_S)
    gate.open.set()
    assert pipeline.collect(first).dists[0]
    output = pipeline.collect(second)
    assert output.scored[0] == (1, 2)
    assert_same(output.dists[0], scratch(whole, (9, 8, 7, 1, 3, 5, 6))[5:])
    last = pipeline.collect(other)
    assert last.scored[0] == () and not last.dists[0]
    assert_same(last.dists[1], scratch(whole, (3, 4))[1:])
    assert gate.rows == [3, 2, 2], "of seven drafts behind the first three rows two are left"
    pipeline.check()
    assert pipeline.length(seq) == 7


def test_any_course_of_segments_and_prunes_ends_as_its_sender_sees_it(
    made: Rig, pipeline: RemotePipeline, whole: Engine
) -> None:
    for seed in range(12):
        _play(pipeline, whole, SeqId(100 + seed), Random(seed))
    pipeline.check()
    assert [stage.free_rows() for stage in spans(made)] == [512, 512]


def _play(pipeline: RemotePipeline, whole: Engine, seq: SeqId, random: Random) -> None:
    sender = Sender(seq, random, tuple(random.randrange(90) for _ in range(random.randint(1, 20))))
    batch = Batch((Segment(seq, 0, sender.prompt),))
    under_way: deque[tuple[Ticket, Segment]] = deque([(pipeline.submit(batch), batch.segments[0])])

    def take() -> None:
        ticket, segment = under_way.popleft()
        _check_rows(sender, segment, pipeline.collect(ticket), whole)

    sender.grow()
    for _ in range(12):
        while sender.lagging:
            segment = sender.lagging.popleft()
            under_way.append((pipeline.submit(Batch((segment,))), segment))
        if random.random() < 0.5:
            sender.grow()
            continue
        while under_way and random.random() < 0.3:
            take()
        sender.lagging.extend(segment for _, segment in under_way)  # so that the prune names a horizon
        keep, live, horizon = sender.prune()
        sender.lagging.clear()
        pipeline.prune(seq, keep, live, horizon)
    while under_way:
        take()
    pipeline.check()
    pipeline.release(seq)


def _check_rows(sender: Sender, segment: Segment, output: Output, whole: Engine) -> None:
    if segment.parents is None:
        assert_same(output.dists[0], scratch(whole, segment.tokens)[-1:])
        return
    rows = output.scored[0] if output.scored[0] is not None else tuple(range(len(segment.tokens)))
    assert set(rows) >= set(sender.wanted(segment)), "what is still of use is scored, others may be"
    names = [segment.node_ids[row] for row in rows]
    assert_same(output.dists[0], [scratch(whole, sender.text(name))[-1] for name in names])


def test_a_step_that_fails_at_one_stage_costs_its_sequences_only(
    made: Rig, pipeline: RemotePipeline, whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = spans(made)[1]
    forward = stage.forward

    def fails(batch: Batch, hidden: Tensor | None = None) -> StageOutput:
        if any(7 in segment.tokens for segment in batch.segments):
            raise RuntimeError("a stage breaks")
        return forward(batch, hidden)

    monkeypatch.setattr(stage, "forward", fails)
    good = pipeline.submit(chain(1, 0, (1, 2)))
    bad = pipeline.submit(chain(2, 0, (7, 2)))
    behind = pipeline.submit(chain(2, 2, (3,)))
    well = pipeline.submit(chain(1, 2, (3,)))
    pipeline.collect(good)
    for ticket in (bad, behind):
        with pytest.raises(EngineError):
            pipeline.collect(ticket)
    with pytest.raises(EngineError, match="lost"):
        pipeline.submit(chain(2, 3, (3,)))
    assert_same(pipeline.collect(well).dists[0], scratch(whole, (1, 2, 3))[2:])
    pipeline.release(SeqId(2))
    found = pipeline.collect(pipeline.submit(chain(2, 0, (5,))))  # anew
    assert_same(found.dists[0], scratch(whole, (5,)))
    pipeline.check()


def test_tokens_are_sampled_at_the_last_stage_with_the_batch_or_behind_it(
    pipeline: RemotePipeline, whole: Engine
) -> None:
    prompt = (5, 6, 7)
    rows = tuple(
        RowSampling(SamplingParams(temperature=1.0, seed=3, top_p=0.9), position, 2048, num_top=3)
        for position in range(3)
    )
    expected = whole.sample([SampleRequest((whole.forward(chain(9, 0, prompt)).logits,), rows)])[0]
    whole.release(SeqId(9))
    for seq, ahead in ((1, True), (2, False)):
        ticket = pipeline.submit(chain(seq, 0, prompt))
        if ahead:
            pipeline.sample_ahead(ticket, [rows])
        output = pipeline.collect(ticket)
        (found,) = pipeline.sample([SampleRequest((output.logits,), rows)])
        assert [row.token for row in found] == [row.token for row in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.top is not None and other.top is not None
            assert np.array_equal(one.top.ids, other.top.ids)
            assert np.allclose(one.top.probs, other.top.probs, atol=1e-4)


def test_rows_that_a_prune_has_dropped_on_the_way_are_not_sampled(whole: Engine) -> None:
    rows = tuple(RowSampling(SamplingParams(temperature=0.0), position, 2048) for position in range(3))
    (logits,) = whole.forward(Batch((Segment(SeqId(9), 0, (5, 6, 7), logits=2),))).logits
    expected = whole.sample([SampleRequest(((logits,),), rows[1:])])[0]
    whole.release(SeqId(9))
    last = LastRows()
    last.keep(4, [(logits, (1, 2)), (None, ())])
    asked = SampleRows(1, [Wanted([[(4, segment)]], list(rows), None) for segment in (0, 1)])
    assert last.has(asked)
    answer = last.answer(asked, 2048)
    assert isinstance(answer, SampledRows)
    assert [[row.token for row in found] for found in answer.rows] == [[row.token for row in expected], []]


@pytest.mark.parametrize("format", ROW_FORMATS)
def test_hidden_rows_come_back_rounded_to_their_format_and_then_unchanged(format: RowFormat) -> None:
    rows = torch.cat([torch.randn(3, 5), torch.full((1, 5), 1e6)])
    once = rows_from_bytes(bytearray(rows_to_bytes(rows, format)), format, 4, 5)
    again = rows_from_bytes(bytearray(rows_to_bytes(once, format)), format, 4, 5)
    assert torch.equal(once, again) and once.isfinite().all()
    assert torch.allclose(once[:3].float(), rows[:3], rtol=2.0**-8)
    assert rows_from_bytes(bytearray(rows_to_bytes(rows[:0], format)), format, 0, 5).shape == (0, 5)
    with pytest.raises(EngineError, match="bytes for"):
        rows_from_bytes(bytearray(7), format, 4, 5)
