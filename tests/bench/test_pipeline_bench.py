"""The bench of `pipeline`: recorded texts are played again honestly, and every way of drafting writes them."""

from __future__ import annotations

import numpy as np
import pytest

from bench.pipeline import FULL, PLAIN, WAYS, Workload, _claims, _measure
from bench.speculation.recorded import RecordedEngine, Recording
from lab.engines import Noisy
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import SampleRequest
from paceline.engine.fake import FakeEngine

VOCAB = 257
BIAS = {256: -100.0}
PROMPT = tuple(b"user: write a story.\nassistant: ")


def recorded(temperature: float, tokens: int = 24) -> Recording:
    sampling = SamplingParams(temperature=temperature, seed=3, logit_bias=BIAS)
    return Recording.of(FakeEngine(seed=1), PROMPT, sampling, tokens, VOCAB)


def test_a_recording_is_played_along_its_text_and_nowhere_else() -> None:
    recording = recorded(1.0)
    engine = RecordedEngine(recording, VOCAB)
    (first,) = engine.forward(Batch((Segment(SeqId(1), 0, PROMPT),))).logits
    np.testing.assert_array_equal(first.dists()[0].probs, recording.dists[0].probs)
    a, b = recording.tokens[:2]
    wrong = (a + 1) % 256
    start = len(PROMPT)
    tree = Segment(SeqId(1), start, (a, wrong, b, b), (-1, -1, 0, 1), "all", (0, 1, 2, 3))
    later = Segment(SeqId(1), start + 4, (recording.tokens[2],), (2,), "all", (4,))
    (rows,) = engine.forward(Batch((tree,))).logits
    asked = tuple(RowSampling(recording.sampling, 0, VOCAB, num_top=4) for _ in range(4))
    (sampled,) = engine.sample([SampleRequest(((rows,),), asked)])
    assert [row.token for row in sampled] == [b, 0, recording.tokens[2], 0]
    assert sampled[0].top is not None and sampled[1].top is None
    (rows,) = engine.forward(Batch((later,))).logits
    np.testing.assert_array_equal(rows.dists()[0].probs, recording.dists[3].probs)


def test_every_way_writes_the_text_and_pays_as_the_paper_says() -> None:
    """With a draft model that is right most of the time."""
    load = Workload(tokens=40)
    recording = recorded(0.0, load.tokens)
    draft = Noisy(FakeEngine(seed=1), 0.15)
    taken = {way: _measure(load, how, [recording], draft, VOCAB, OnlineStats()) for way, how in WAYS.items()}
    assert taken[PLAIN]["turns_per_token"] == pytest.approx(4.0, abs=0.1)
    rates = {way: row["tokens_per_s"] for way, row in taken.items()}
    assert rates[PLAIN] < rates["naive"] < rates["pruned"] <= rates[FULL] and rates["PipeDec"] < rates[FULL]
    rows = [{"task": "one", "temperature": 0.0, "way": way, **row} for way, row in taken.items()]
    claims = {claim.name: claim.value for claim in _claims(rows, Workload(temperatures=(0.0,)))}
    assert claims["pipeline.vs_naive"] == pytest.approx(rates[FULL] / rates["naive"])
    again = _measure(load, WAYS[FULL], [recording], draft, VOCAB, OnlineStats())
    assert again == taken[FULL], "virtual time repeats"
