"""Which engine runs weights in safetensors on a CPU, where two can and none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine import layer_kernel, loader, weights
from paceline.engine.base import Engine
from paceline.engine.llama_cpp import engine
from paceline.engine.loader import Backend, load_model
from paceline.errors import ConfigError
from paceline.models import DEVICE
from tests.kernels import built


@pytest.fixture(autouse=True)
def is_slow_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration's model counts as large, on a processor without arithmetic in bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "_SMALL_MODEL", 0)
    monkeypatch.setattr(weights, "computes_bfloat16", lambda: False)
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)


def taken(backend: Backend = "auto") -> tuple[str, str]:
    info = load_model(DEVICE, threads=1, kv_rows=256, backend=backend).engine.info
    return info.backend, info.dtype


def test_half_precision_that_torch_would_compute_in_float32_is_copied_for_llama_cpp_once(tmp_path: Path) -> None:
    assert [taken(), taken()] == [("llama_cpp", "bf16")] * 2
    assert len(list(tmp_path.glob("paceline/quantized/*.gguf"))) == 1
    assert load_model(DEVICE, threads=1, kv_rows=256, dtype="float32").engine.info.backend == "paged"


def test_torch_runs_it_with_the_kernel_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(weights, "computes_bfloat16", lambda: False)
    if layer_kernel.kernel() is None:
        monkeypatch.setattr(layer_kernel, "kernel", lambda: built("paceline.engine._layer_kernel"))
    assert taken() == ("paged", "float32")
    assert not list(tmp_path.glob("paceline/quantized/*"))


def test_torch_runs_what_it_computes_in_the_format_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "computes_bfloat16", lambda: True)
    assert taken() == ("paged", "bfloat16")
    monkeypatch.setattr(weights, "_SMALL_MODEL", 100_000_000)
    assert taken() == ("paged", "float32"), "a small model is as fast there"
    assert not list(tmp_path.glob("paceline/quantized/*"))


def test_speed_does_not_buy_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "measured", lambda *_: (1, False))
    assert taken() == ("paged", "float32")


def test_without_room_for_a_copy_torch_runs_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "paceline").mkdir()
    (tmp_path / "paceline" / "quantized").write_text("no folder")
    assert taken() == ("paged", "float32") and "runs on torch, where it is slower" in caplog.text


def test_a_copy_that_llama_cpp_does_not_load_leaves_the_model_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> Engine:
        raise ConfigError("it cannot be loaded by llama.cpp")

    monkeypatch.setattr(engine, "load_gguf", refused)
    assert taken() == ("paged", "float32") and "cannot be loaded by llama.cpp" in caplog.text


def test_without_torch_whatever_llama_cpp_can_run_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "computes_bfloat16", lambda: True)
    monkeypatch.setattr(loader, "has_torch", lambda: False)
    assert taken() == ("llama_cpp", "bf16")


@pytest.mark.parametrize("backend", ["paged", "hf"])
def test_an_engine_that_is_named_is_taken(backend: Backend) -> None:
    assert taken(backend)[0] == backend
