"""The engine's bench runs and reports its rows and claims. Speed is not tested."""

from __future__ import annotations

import torch

from bench.engine import Workload, run
from bench.report import Options


def test_the_engine_bench_measures_all_sides_at_all_rows() -> None:
    tiny = Workload(
        rows=(1, 3, 16),
        rounds=2,
        prefix=20,
        layers=2,
        hidden=32,
        inner=48,
        heads=4,
        kv_heads=2,
        vocab=64,
        dtype=torch.float32,
        copied=1 << 16,
    )
    report = run(Options(quick=True), tiny)
    assert [row["rows"] for row in report.rows] == [1, 3, 16]
    for row in report.rows:
        for key in ("transformers_ms", "paged_ms", "times_faster", "weights_gb_per_s", "copy_gb_per_s"):
            value = row[key]
            assert isinstance(value, float) and value > 0
    targets = {claim.name: (claim.target, claim.better) for claim in report.claims}
    assert targets == {"engine.vs_transformers": (1.5, "higher"), "engine.rows16_vs_row1": (1.3, "lower")}
    assert set(report.to_json()) == {"bench", "commit", "conditions", "rows", "claims"}
