"""Arithmetic of the perplexity bench: closed forms, shared contexts and the gain ratio, and a complete run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.perplexity import Measured, Workload, run, score_plans
from bench.report import Options
from bench.retrieval.methods import Context, Plan
from bench.retrieval.ngram_model import Static, fit
from bench.retrieval.scorers import EngineScorer, Ids, Probabilities
from paceline.core.aggregation.weights import EVIDENCE_SCALE
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.fake import FakeEngine

VOCAB = 5


class Counting:
    """p(token) after a context: 1/2 for the context's first token, the rest uniform over all others."""

    description = "a table"

    def __init__(self) -> None:
        self.scored: list[Ids] = []

    def score(self, contexts: Sequence[Ids], text: Ids, start: int) -> list[Probabilities]:
        self.scored += contexts
        return [np.array([self._prob(context, token) for token in text[start:]]) for context in contexts]

    @staticmethod
    def _prob(context: Ids, token: int) -> float:
        if not context:
            return 1.0 / VOCAB
        return 0.5 if token == context[0] else 0.5 / (VOCAB - 1)


def test_perplexity_of_a_known_model_is_its_closed_form() -> None:
    text = (0, 1, 2, 3, 1, 1)
    alone = Plan("none", (Context("device", (), None),))
    even = Plan("ours", (Context("device", (1,), 0.0), Context("cloud", (2,), 0.0)))
    tilted = Plan("ours", (Context("device", (1,), math.log(3)), Context("cloud", (2,), 0.0)))
    scorer = Counting()
    logs = score_plans(scorer, {"alone": alone, "even": even, "tilted": tilted}, text, 1)
    assert logs["alone"] == pytest.approx(5 * math.log(1 / VOCAB))
    either, other = (0.5 + 0.125) / 2, 0.125
    assert logs["even"] == pytest.approx(4 * math.log(either) + math.log(other))
    ones, twos = 0.75 * 0.5 + 0.25 * 0.125, 0.75 * 0.125 + 0.25 * 0.5
    assert logs["tilted"] == pytest.approx(3 * math.log(ones) + math.log(twos) + math.log(other))
    assert scorer.scored == [(), (1,), (2,)]  # each once, though two plans share them
    measured = Measured(np.array([5.0, 5.0]), {(0, "none"): np.array([logs["alone"], logs["alone"]])})
    assert measured.perplexity(0, "none") == pytest.approx(VOCAB)


def test_a_branch_that_has_predicted_the_text_weighs_more_from_the_next_token_on() -> None:
    contexts = (Context("device", (1,), 0.0), Context("cloud", (2,), 0.0))
    plan = Plan("ours", contexts, rescored=True)
    logs = score_plans(Counting(), {"plan": plan}, (0, 1, 1), 1)
    odds = math.exp(EVIDENCE_SCALE * (math.log(0.5) - math.log(0.125)))  # after one token that the first predicted
    first = odds / (odds + 1)
    assert logs["plan"] == pytest.approx(math.log(0.3125) + math.log(first * 0.5 + (1 - first) * 0.125))


def test_an_engine_scores_many_contexts_as_it_scores_each_alone() -> None:
    engine, text = FakeEngine(3), tuple(b"once upon a time")
    contexts: list[Ids] = [(), tuple(b"a document. "), tuple(b"another one, longer. ")]
    scores = EngineScorer(engine, "fake", max_rows=70).score(contexts, text, 4)
    for context, probabilities in zip(contexts, scores, strict=True):
        tokens = context + text
        (dists,) = engine.forward(Batch((Segment(SeqId(0), 0, tokens, logits="all"),))).dists
        engine.release(SeqId(0))
        first = len(context) + 4
        expected = [dists[i - 1].prob(tokens[i]) for i in range(first, len(tokens))]
        assert probabilities == pytest.approx(expected)
    engine.check()


def test_the_tables_give_probabilities_that_sum_to_one() -> None:
    generator = np.random.default_rng(2)
    reading = [generator.integers(VOCAB, size=50).tolist() for _ in range(4)]
    static = Static(reading, VOCAB)
    text: Ids = (0, 1, 2, 1, 2, 3)
    samples = [((4, 1, 2, 3), text, 3), ((), (3, 3, 1, 0, 2, 4), 3)]
    model = fit(static, samples, "a test's")
    for context in ((), (1, 2, 3, 0), (4,) * 6):
        total = sum(model.score([context], (*text, token), len(text))[0][0] for token in range(VOCAB))
        assert total == pytest.approx(1.0)
        assert sum(static.probabilities((*text, token), len(text))[0] for token in range(VOCAB)) == pytest.approx(1.0)


def test_a_quick_run_without_data_reports_every_model_at_every_depth(tmp_path: Path) -> None:
    load = Workload(depths=(0, 1), budget=32, window=48, passage=16, windows=2, tested=2, embedder="hash", resamples=9)
    report = run(Options(quick=True), load)
    assert [(row["model"], row["articles"], row["documents"]) for row in report.rows] == [
        (model, articles, depth)
        for model in ("demo", "tables")
        for articles, depth in (("own", 0), ("own", 1), ("other", 1))
    ]
    for row in report.rows:
        taken = {row[method] for method in ("none", "crcg_device", "crcg_cloud", "drcg", "ours", "fixed")}
        assert (len(taken) == 1) == (row["documents"] == 0), "without documents all are the same"
    for model in ("demo", "tables"):
        bare = {row["none"] for row in report.rows if row["model"] == model}
        assert len(bare) == 1, "nor is there any where none are retrieved"
    assert [claim.name for claim in report.claims] == [
        "perplexity.owed_to_documents",
        "perplexity.gain_ratio",
        "perplexity.owed_to_documents_tables",
        "perplexity.gain_ratio_tables",
    ]
    assert all(claim.interval is not None and claim.better == "higher" for claim in report.claims)
    assert report.conditions["text"] == "generated encyclopaedia"
    file = tmp_path / "report.json"
    report.write(file)
    assert file.stat().st_size > 500
