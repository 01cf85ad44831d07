"""The engine's bench runs and reports its rows and claims. Speed is not tested."""

from __future__ import annotations

import torch

from bench import gpu_step
from bench.engine import Workload, run
from bench.random_model import Shape
from bench.report import Options
from lab.torch_kernels import TorchKernels


def test_the_engine_bench_measures_all_sides_at_all_rows() -> None:
    tiny = Workload(
        rows=(1, 3, 16),
        rounds=2,
        prefix=20,
        shape=Shape(layers=2, hidden=32, inner=48, heads=4, kv_heads=2, vocab=64),
        dtype=torch.float32,
        copied=1 << 16,
    )
    report = run(Options(quick=True), tiny)
    assert [row["rows"] for row in report.rows] == [1, 3, 16]
    for row in report.rows:
        for key in ("transformers_ms", "paged_ms", "times_faster", "weights_gb_per_s", "copy_gb_per_s"):
            value = row[key]
            assert isinstance(value, float) and value > 0
    assert {claim.name for claim in report.claims} == {"engine.vs_transformers", "engine.rows16_vs_row1"}
    assert set(report.to_json()) == {"bench", "commit", "conditions", "rows", "claims"}


def test_a_gpus_step_is_measured_by_the_same_code_on_a_cpu() -> None:
    load = gpu_step.Load(
        model=Shape(layers=2, hidden=32, inner=48, heads=4, kv_heads=2, vocab=300, positions=80, tied=False),
        dtype=torch.float32,
        context=40,
        batches=((1, 1.5), (6, 2.0)),
        steps=3,
        warm_up=2,
        copied=1 << 16,
    )
    assert load.row_bytes == 2 * 2 * 2 * 8 * 4
    rows, claims = gpu_step.measure(load, torch.device("cpu"), attention=TorchKernels())
    assert [row["sequences"] for row in rows] == [1, 6]
    for row in rows:
        assert row["attention"] == "twin" and row["graphs"]
        for key in ("step_ms", "forward_ms", "limit_ms", "over_limit", "read_gb_per_s"):
            value = row[key]
            assert isinstance(value, float) and value > 0
    names = ("step_1_over_limit", "step_6_over_limit", "vocabulary_rows_to_host")
    assert [(claim.name, claim.target) for claim in claims] == [
        (f"engine.gpu_{name}", target) for name, target in zip(names, (1.5, 2.0, 0), strict=True)
    ]
