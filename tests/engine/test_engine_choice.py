"""Which engine runs weights in safetensors: timed once, where two can run them and none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine import engine_choice
from paceline.engine.base import Engine
from paceline.engine.engine_choice import Times, timed
from paceline.engine.loader import Backend, load_model
from paceline.models import DEVICE

SECONDS = {"llama_cpp": (0.1, 0.3), "paged": (0.2, 0.2)}
EXACT = {"llama_cpp": True, "paged": True}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were timed, in order; their times are `SECONDS`."""
    found: list[str] = []

    def stand_in(engine: Engine) -> Times:
        assert timed(engine).many > 0
        found.append(engine.info.backend)
        return Times(engine.info.backend, engine.info.dtype, EXACT[engine.info.backend], *SECONDS[engine.info.backend])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_choice, "timed", stand_in)
    monkeypatch.setattr(engine_choice, "SMALL", 0)
    return found


def test_the_engine_with_the_smaller_product_of_times_is_taken_and_timed_once(
    asked: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "paceline.engine")
    for _ in range(2):
        info = load_model(DEVICE, threads=1).engine.info
        assert (info.backend, info.dtype) == ("llama_cpp", "bf16") and asked == ["paged", "llama_cpp"]
    said = "one answer, and one each of 16, take llama_cpp in bf16 100 and 300 ms; paged in float32 200 and 200 ms"
    assert caplog.text.count(said) == 2
    assert len(list(tmp_path.glob("paceline/quantized/*.gguf"))) == 1
    monkeypatch.setattr("paceline.engine.engine_choice.version", lambda _: "another")
    monkeypatch.setitem(SECONDS, "paged", (0.1, 0.2))
    assert load_model(DEVICE, threads=1).engine.info.backend == "paged" and len(asked) == 4
    assert not list(tmp_path.glob("paceline/quantized/*.gguf")), "nothing is kept that is not used"
    monkeypatch.setattr("paceline.engine.engine_choice.version", lambda _: "a third")
    monkeypatch.setitem(SECONDS, "llama_cpp", (0.01, 0.01))
    monkeypatch.setitem(EXACT, "llama_cpp", False)
    assert load_model(DEVICE, threads=1).engine.info.backend == "paged", "speed does not buy exactness"


@pytest.mark.parametrize("backend", ["paged", "hf"])
def test_an_engine_that_is_named_is_taken_untimed(asked: list[str], backend: Backend) -> None:
    assert load_model(DEVICE, threads=1, backend=backend, kv_rows=256).engine.info.backend == backend
    assert not asked


def test_small_models_and_formats_that_are_named_are_run_on_torch_untimed(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_model(DEVICE, threads=1, kv_rows=256, dtype="float32").engine.info.backend == "paged"
    monkeypatch.setattr(engine_choice, "SMALL", 200 << 20)
    assert load_model(DEVICE, threads=1, kv_rows=256).engine.info.backend == "paged"
    assert not asked
