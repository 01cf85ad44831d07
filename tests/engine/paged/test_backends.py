"""Who attends: chosen by device and format, and replaced at load where it does not score as the model does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.torch_kernels import TorchKernels
from paceline.engine.loader import load_engine
from paceline.engine.paged import engine as paged
from paceline.engine.paged.attention import backends
from paceline.engine.paged.attention.backends import Run, choose_attention
from paceline.engine.paged.attention.tile_plan import Operands
from paceline.engine.paged.engine import PagedEngine
from tests.engine.conftest import HERE
from tests.engine.trials import extend, sequences

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "is_installed", "expected"),
    [
        (CPU, torch.bfloat16, 128, True, "gathered"),
        (GPU, torch.bfloat16, 128, True, "triton"),
        (GPU, torch.float16, 64, True, "triton"),
        (GPU, torch.float32, 256, True, "triton"),
        (GPU, torch.bfloat16, 512, True, "gathered"),
        (GPU, torch.float64, 64, True, "gathered"),
        (GPU, torch.bfloat16, 128, False, "gathered"),
    ],
)
def test_a_gpu_gets_triton_where_it_can_and_a_warning_where_not(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    is_installed: bool,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if is_installed else None)
    assert choose_attention(device, dtype, dim) == expected
    assert len(caplog.records) == (device == GPU and expected == "gathered")


@pytest.mark.parametrize("fault", ["wrong numbers", "an error"])
def test_kernels_that_fail_the_test_at_load_are_replaced_with_one_warning(
    fault: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a GPU on which the kernels do not compile, or compute something else."""

    def attend(_: TorchKernels, operands: Operands, *__: object) -> None:
        if fault == "an error":
            raise ValueError("out of resources: shared memory")
        operands.output.fill_(torch.nan)  # which reaches K and V of the next layer

    monkeypatch.setattr(backends, "choose_attention", lambda *_: TorchKernels())
    monkeypatch.setattr(TorchKernels, "attend", attend)
    options = HERE._replace(backend="paged", kv_rows=256, graphs=False)
    engine = load_engine(checkpoint("llama"), options, name="llama")
    assert isinstance(engine, PagedEngine) and engine.attention == "gathered"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "llama: twin attention does not score as the model's plain forward does"
    ]
    free = engine.free_rows()
    with sequences(engine) as (seq,):
        assert all(np.isfinite(dist.probs).all() for dist in extend(engine, seq, [1, 2, 3]))
    assert engine.free_rows() == free == 256


def test_graphs_that_fail_the_test_at_load_are_left_out_and_the_kernels_stay(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(run: Run) -> Run:
        return lambda: run() * 0.0

    monkeypatch.setattr(backends, "choose_attention", lambda *_: TorchKernels())
    monkeypatch.setattr(paged, "capture_of", lambda *_: capture)
    engine = load_engine(checkpoint("llama"), HERE._replace(backend="paged", kv_rows=256), name="llama")
    assert isinstance(engine, PagedEngine) and engine.attention == "twin" and engine.graphs is None
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "llama: twin attention with replayed steps does not score as the model's plain forward does"
    ]
