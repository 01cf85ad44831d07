"""The bench of `draft_verify` drives the served machines; its engines accept as they say, its figures are equal."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from bench.draft_verify import capacity, grid, parents, processes, radio
from bench.draft_verify.answers import COMPUTE_W, DRAFT_S, Setting, play, total
from bench.draft_verify.paired_engines import ENTROPIES, PairedEngine, nats_of
from bench.draft_verify.ways import CLOUD_DECODING, co_located, static
from paceline.core.batching.segment import Batch, Segment, SeqId


@pytest.fixture
def engines() -> dict[str, PairedEngine]:
    return {"cloud": PairedEngine(target=True), "device": PairedEngine(target=False)}


def test_both_models_agree_at_the_papers_rate_and_share_no_token_elsewhere(engines: dict[str, PairedEngine]) -> None:
    chain = Segment(SeqId(1), 0, tuple(range(1000, 2500)), logits="all")
    (target,), (draft,) = (engine.forward(Batch((chain,))).dists for engine in engines.values())
    agrees = []
    for theirs, own in zip(target, draft, strict=True):
        equal = bool(np.array_equal(theirs.ids, own.ids))
        assert equal or not set(theirs.ids) & set(own.ids)
        assert np.array_equal(theirs.probs, own.probs)
        nats = nats_of(int(own.ids[0]))
        assert own.entropy() == pytest.approx(nats, abs=0.01) and nats == nats_of(int(own.ids[-1]))
        agrees.append((equal, nats))
    assert statistics.fmean(equal for equal, _ in agrees) == pytest.approx(0.9, abs=0.025)
    unsure = [(equal, nats) for equal, nats in agrees if nats > 0.8]
    expected = statistics.fmean(math.exp(-0.35 * nats) for _, nats in unsure)
    assert statistics.fmean(equal for equal, _ in unsure) == pytest.approx(expected, abs=0.12)
    assert statistics.fmean(math.exp(-0.35 * nats) for nats in ENTROPIES) == pytest.approx(0.9, abs=0.001)


def test_a_step_takes_what_eq_4_says_and_co_located_drafting_costs_the_device_nothing(
    engines: dict[str, PairedEngine],
) -> None:
    setting = Setting(radio.payload_for(0.25), tokens=60, answers=1)
    plain = total(play(CLOUD_DECODING, setting, engines))
    assert plain.seconds == pytest.approx(60 * setting.verify) and plain.joules == 0.0
    seven = total(play(static(7), setting, engines))
    steps = seven.cloud_forwards * setting.verify + seven.drafting_forwards * DRAFT_S
    assert seven.seconds == pytest.approx(steps, abs=setting.verify + DRAFT_S), "both prompts' forwards overlap"
    assert seven.joules == pytest.approx(COMPUTE_W * DRAFT_S * seven.drafting_forwards)
    beside = total(play(co_located(7), setting, engines))
    assert beside.joules == 0.0 and beside.cloud_forwards == seven.cloud_forwards
    assert beside.seconds < seven.seconds


def test_at_1_mhz_ours_is_faster_than_every_way_of_the_paper_and_figures_are_repeatable() -> None:
    load = replace(radio.QUICK, uplinks=(), frontier=(1,))
    found = radio.measure(load)
    speed = {str(row["way"]): float(str(row["tokens_per_s"])) for row in found.rows if row["part"] == "figure 5"}
    published = [way.name for way in radio.PUBLISHED]
    assert speed["ours"] > 1.65 * max(speed[name] for name in (*published, "DSSD", "cloud decoding"))
    least = {str(row["way"]): float(str(row["joules_per_token"])) for row in found.rows if row["part"] == "figure 5"}
    assert least[radio.THRIFTY.name] < 0.6 * min(least[name] for name in published)
    values = {claim.name: claim.value for claim in found.claims}
    assert values["draft_verify.throughput_1mhz"] > 1.65 and set(found.intervals) < set(values)
    again = {side: PairedEngine(target=side == "cloud") for side in ("cloud", "device")}
    setting = Setting(radio.payload_for(0.25), 1e6, tokens=load.tokens, answers=load.answers)
    assert total(play(radio.OURS, setting, again)).tokens_per_s == speed["ours"]


def test_every_way_of_the_grid_is_measured_and_ours_is_no_slower_than_the_cloud_alone() -> None:
    found = grid.measure(replace(grid.QUICK, verify=(0.03,)))  # where a cloud is fast, drafts gain least
    assert {row["way"] for row in found.rows} == set(grid.WAYS)
    claims = {claim.name: claim.value for claim in found.claims}
    assert claims["draft_verify.virtual_vs_cloud_decoding"] >= 0.97


def test_tables_beside_drafts_are_ahead_of_either_where_both_draft_and_never_behind() -> None:
    claims = {claim.name: claim.value for claim in parents.measure(replace(parents.QUICK, answers=1)).claims}
    assert claims["draft_verify.where_both_draft"] >= 1.1 and claims["draft_verify.vs_better_parent"] >= 0.97


def test_a_full_cloud_serves_more_answers_with_drafts_of_devices() -> None:
    found = capacity.measure(capacity.QUICK)
    answers = {str(row["way"]): float(str(row["answers"])) for row in found.rows}
    assert answers["devices, cloud waits, 2 and ahead"] > answers["plain decoding"]
    cost = capacity.SEVEN_B.cost
    small = capacity.HALF_B.cost
    verify = cost.base_s + 50 * (cost.sequence_s + 4 * cost.row_s)
    assert capacity.closed_form(capacity.SEVEN_B, 3, 50) == pytest.approx(
        1 + 3 * (small.base_s + 50 * (small.sequence_s + small.row_s)) / verify
    )


def test_two_processes_write_the_clouds_text_whatever_is_drafted() -> None:
    found = processes.measure(replace(processes.QUICK, rounds=1))  # it stops where texts differ
    assert [row["way"] for row in found.rows] == list(processes.WAYS)
    assert {claim.name for claim in found.claims} == {
        f"draft_verify.{name}" for name in ("worst_link_vs_static7", "vs_cloud_decoding", "uplink_bytes_per_draft")
    }
