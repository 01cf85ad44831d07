"""The serving bench: its model, its claims, and all parts on a tiny model with real processes. Speed is not tested."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.report import Options
from bench.serving import PARTS, QUICK, run
from bench.serving.clients import Answer
from bench.serving.model_files import ModelFiles
from bench.serving.systems import LlamaCpp, Transformers
from bench.serving.throughput import OURS, SAMPLED, Load, Measured, Round
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.loader import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles.write(tmp_path_factory.mktemp("serving") / "model", QUICK.shape)


def test_only_whole_words_are_likely_and_no_token_ends_an_answer(model: ModelFiles) -> None:
    loaded = load_model(model.directory, threads=1, kv_rows=64)
    assert loaded.tokenizer.eos_ids == frozenset()
    assert loaded.tokenizer.vocab_size == loaded.engine.info.vocab_size == QUICK.shape.vocab
    words = model.vocabulary.words
    (dist,) = loaded.engine.forward(Batch((Segment(SeqId(1), 0, tuple(words[3:9])),))).dists[0]
    assert dist.argmax() in words
    assert dist.prob(len(model.vocabulary.tokens) - 1) < 0.01 * dist.prob(dist.argmax())


# ---- rows and claims -------------------------------------------------------------------------------------------------
def rounds(*rates: float) -> list[Round]:
    """Rounds of one answer with ten tokens at these rates."""
    return [Round([Answer("x", 10, 5, 0, 1.0, 1.5, 1.0 + 10 / rate)]) for rate in rates]


def test_claims_compare_within_rounds_with_the_faster_mode_of_a_baseline() -> None:
    load = Load(baselines=(Transformers(batching=False), Transformers(batching=True), LlamaCpp()))
    measured = Measured(load, left_out={"llama.cpp server": "not installed: gguf"})
    for clients in (1, 16):
        measured.rounds[OURS, clients] = rounds(40.0, 80.0)
        measured.rounds[SAMPLED, clients] = rounds(36.0, 72.0) if clients == 1 else rounds(38.0, 76.0)
    measured.rounds["transformers serve", 16] = rounds(10.0, 5.0)
    measured.rounds["transformers serve --continuous-batching", 16] = rounds(5.0, 20.0)
    found = measured.findings()
    claims = {claim.name: claim for claim in found.claims}
    assert set(found.intervals) == set(claims)
    assert set(claims) == {"serving.sampled_vs_greedy", "serving.vs_transformers_serve_16"}
    assert claims["serving.sampled_vs_greedy"].value == pytest.approx(0.9)
    assert claims["serving.vs_transformers_serve_16"].value == pytest.approx(4.0)
    (left_out,) = [row for row in found.rows if "left_out" in row]
    assert left_out["way"] == "llama.cpp server" and left_out["left_out"] == "not installed: gguf"


# ---- the parts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_a_tiny_model(part: str) -> None:
    """Without baselines, which may be installed or not and take longer to start than all the rest."""
    load = replace(QUICK, parts=(part,), throughput=replace(QUICK.throughput, rounds=1, baselines=()))
    report = run(Options(quick=True), load)
    names = {claim.name for claim in report.claims}
    assert (
        names
        == {
            "throughput": {"serving.sampled_vs_greedy"},
            "sharing": {"serving.multi_turn_ttft"},
            "gaps": {"serving.gap_beside_long_prompt"},
            "host": {"engine.host_ms_per_step_8", "engine.host_us_per_tree_row"},
            "joint": {"engine.joint_targets_per_s"},
            "memory": {"engine.memory_vs_weights"},
        }[part]
    )
    assert all(claim.value > 0 for claim in report.claims)
    cached = {str(row["cached"]): row["cached_tokens"] for row in report.rows if "cached" in row}
    if part == "sharing":
        assert cached["no"] == 0
        assert int(str(cached["yes"]).split(".")[0]) > 0
    if part == "throughput":
        template = 8  # tokens before the first word of a prompt, which are the same in all
        assert all(int(row["cached_tokens"]) <= template for row in report.rows)
