"""`bench ttft` on a tiny model: all methods run, ours over HTTP, and bytes and rows agree with their definitions."""

from __future__ import annotations

from bench import ttft
from bench.aggregation.two_process_rig import Shape
from bench.report import Options

TINY = Shape(layers=2, hidden=64, inner=96, heads=4, kv_heads=4)
REGIME = ttft.Regime(40, 1e9, 0.0, ttft.ComputedForward(shape=TINY))
WAYS = ["device only", "ours", "DRCG/Text", "DRCG/Text, as published", "DRCG/KV"]


def test_each_method_computes_and_fetches_its_rows_and_bytes() -> None:
    load = ttft.Workload(device=TINY, regimes=(REGIME,), rounds=1, yields=False)
    report = ttft.run(Options(), load)
    assert [row["way"] for row in report.rows] == WAYS
    alone, ours, strong, text, kv = report.rows[:5]
    tail, odd = divmod(int(str(kv["device_rows"])), 2)  # exact: the bench itself prefills it after each document
    assert tail > 0 and not odd
    # A busy loop may read the engine's counter late, with rows of later tokens included.
    assert int(str(alone["device_rows"])) >= tail and int(str(ours["device_rows"])) >= tail
    assert int(str(text["device_rows"])) >= 2 * 36 + tail  # documents of up to 40 tokens, in whole words
    assert 36 + tail <= int(str(strong["device_rows"])) < int(str(text["device_rows"])), (
        "its own document has stored KV"
    )
    assert (alone["fetched_bytes"], ours["fetched_bytes"]) == (0, 0)
    assert int(str(text["fetched_bytes"])) < 400
    assert int(str(kv["fetched_bytes"])) > 36 * TINY.row_bytes == 36 * 2 * 2 * 2 * 64
    assert all(float(str(row["low_ms"])) > 0 for row in report.rows)
    assert [claim.name for claim in report.claims] == [
        "ttft.vs_device_only",
        "ttft.vs_recompute",
        "ttft.vs_recompute_as_published",
        "ttft.vs_kv_transfer",
    ]
