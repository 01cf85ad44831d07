"""A pipeline whose stages are reached over connections: an engine like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import paceline.models
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.row import RowSampling
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, SampleRequest
from paceline.engine.loader import EngineOptions, load_engine
from paceline.errors import EngineError
from tests.engine.trials import assert_same, scratch
from tests.runtime.stages.rig import even_spans, rig

DEMO = Path(paceline.models.__file__).parent / "device"  # of six layers
OPTIONS = EngineOptions(dtype="float32", kv_rows=2048)


@pytest.fixture(scope="module")
def whole() -> Engine:
    torch.set_num_threads(1)
    return load_engine(DEMO, OPTIONS._replace(backend="paged"), name="whole")


def chain(seq: int, start: int, tokens: tuple[int, ...]) -> Batch:
    return Batch((Segment(SeqId(seq), start, tokens, logits="all"),))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_score_as_in_the_whole_model(count: int, whole: Engine) -> None:
    with rig(DEMO, even_spans(6, count), options=OPTIONS) as made:
        pipeline = made.pipeline
        tickets = [
            pipeline.submit(chain(1, 0, (5, 6, 7))),
            pipeline.submit(chain(2, 0, (8, 9))),
            pipeline.submit(chain(1, 3, (10,))),
        ]
        tree = Segment(SeqId(1), 4, (11, 12, 13), (-1, -1, 0), "all")
        tickets.append(pipeline.submit(Batch((tree,))))
        found = [pipeline.collect(ticket).dists[0] for ticket in tickets]
        assert_same([*found[0], *found[2]], scratch(whole, (5, 6, 7, 10)))
        assert_same(found[1], scratch(whole, (8, 9)))
        assert_same(found[3][2:], scratch(whole, (5, 6, 7, 10, 11, 13))[-1:])
        pipeline.prune(SeqId(1), (0, 2))
        assert pipeline.length(SeqId(1)) == 6
        last = pipeline.collect(pipeline.submit(chain(1, 6, (3,)))).dists[0]
        assert_same(last, scratch(whole, (5, 6, 7, 10, 11, 13, 3))[-1:])
        pipeline.check()
        for seq in (1, 2):
            pipeline.release(SeqId(seq))
        pipeline.check()
        assert pipeline.free_rows() == 2048


def test_tokens_are_sampled_at_the_last_stage_with_the_batch_or_behind_it(whole: Engine) -> None:
    prompt = (5, 6, 7)
    rows = tuple(
        RowSampling(SamplingParams(temperature=1.0, seed=3, top_p=0.9), position, 2048, num_top=3)
        for position in range(3)
    )
    expected = whole.sample([SampleRequest((whole.forward(chain(9, 0, prompt)).logits,), rows)])[0]
    whole.release(SeqId(9))
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        pipeline = made.pipeline
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


def test_a_batch_that_cannot_run_is_refused_without_effect(whole: Engine) -> None:
    with rig(DEMO, even_spans(6, 2), options=OPTIONS) as made:
        pipeline = made.pipeline
        with pytest.raises(EngineError, match="starts at 4"):
            pipeline.submit(chain(1, 4, (5,)))
        found = pipeline.collect(pipeline.submit(chain(1, 0, (5, 6)))).dists[0]
        assert_same(found, scratch(whole, (5, 6)))
        pipeline.check()
