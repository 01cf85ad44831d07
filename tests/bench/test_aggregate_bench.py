"""Rows and claims of `bench/aggregate.py`, whose measurement takes real processes and minutes; and its virtual part."""

from __future__ import annotations

import pytest

from bench import aggregate_virtual, wide_vocabulary
from bench.aggregate import PACES, PRIVATE, WAYS, _claims
from bench.streamed_answer import Answer
from paceline.core.side import SIDES, Side


def measured(seconds: dict[str, float]) -> dict[str, list[Answer]]:
    stats = {"drafted_cloud": 10.0, "accepted_cloud": 7.0}
    return {way: [Answer("x", 11, 10 * seconds.get(way, 0.06), dict(stats))] for way in WAYS}


def test_the_claims_are_the_worst_over_both_paces_and_levels() -> None:
    found = {}
    for pace, tree in zip(PACES, (0.05, 0.08), strict=True):
        found[pace, 0.05] = measured({"tree": 0.03, f"tree, {PRIVATE}": 0.045, "device only, lookup_tree": 0.04})
        far = {"tree": tree, f"tree, {PRIVATE}": tree, "chain": 0.1, "token-wise": 0.4, "sequence-wise": 0.2}
        found[pace, 0.3] = measured(far | {f"token-wise, {PRIVATE}": 0.5})
    claims = {claim.name: claim for claim in _claims(found)}
    assert claims["aggregate.tree_vs_chain"].value == pytest.approx(0.8)
    assert claims["aggregate.vs_token_wise_300ms"].value == pytest.approx(0.2)
    assert claims["aggregate.vs_token_wise_300ms"].holds and not claims["aggregate.tree_vs_chain"].holds
    assert claims["aggregate.overhead_50ms"].value == pytest.approx(0.75)
    assert claims["aggregate.vs_device_default_50ms"].value == pytest.approx(1.125)


def test_152k_ids_run_on_real_processes_each_with_its_own_model() -> None:
    load = wide_vocabulary.Load(tokens=4, rounds=1, at_once=(1,), trip=0.02)
    found = wide_vocabulary.measure(load)
    assert len(found.rows) == 5 and all(float(str(row["s_per_token"])) > 0 for row in found.rows)
    assert {claim.name for claim in found.claims} == {
        "aggregate.wide_vs_token_wise_1",
        "aggregate.wide_vs_device_default_1",
    }


def test_the_bound_counts_stretches_that_both_sides_have_drafted() -> None:
    drafts = aggregate_virtual.likeliest([0.6, 0.3], rows=4, ahead=3)
    assert drafts == {(0,), (0, 0), (1,), (0, 0, 0)}
    ranks: dict[Side, list[int]] = {"cloud": [0, 0, 4, 0, 1, 0], "device": [0, 0, 0, 1, 0, 0]}
    # Two drafts and the third target; then both sides have the next one, one of them as its second.
    assert aggregate_virtual.round_trips({"cloud": drafts, "device": drafts}, ranks) == 3
    nothing: dict[Side, frozenset[tuple[int, ...]]] = {"cloud": frozenset(), "device": frozenset()}
    assert aggregate_virtual.round_trips(nothing, ranks) == 6
    assert aggregate_virtual.rates_of([[0, 0], [1, 4]]) == [0.5, 0.25, 0.0, 0.0]


def test_most_targets_are_the_first_choice_of_a_side() -> None:
    learnt = aggregate_virtual.Learnt()
    forward: dict[Side, float] = {"cloud": 0.03, "device": 0.03}
    (written,) = aggregate_virtual.write(aggregate_virtual.joint("open"), forward, 0.05, learnt, 12, [3])
    ranks = {side: aggregate_virtual.ranks_of(side, 3, written.tokens) for side in SIDES}
    assert len(written.tokens) == 12 and written.s_per_token > 0.0
    assert sum(min(pair) == 0 for pair in zip(*ranks.values(), strict=True)) > 8
