"""Weights are in memory once: what was packed leaves the mapping of its file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine import layer_kernel
from paceline.engine.loader import EngineOptions, load_engine
from paceline.engine.paged.packed_linear import release_mapped_weights
from tests.engine.checkpoints import sizeable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")


def mapped_bytes(file: Path) -> int:
    """Resident bytes of this file's mappings in this process."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_leave_the_mapping_of_their_file(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_kernel, "kernel", lambda: None)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(sizeable(tied=tied)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 16_000_000
    engine = load_engine(tmp_path, EngineOptions(backend="paged", kv_rows=64, dtype="float32", device="cpu"), name="m")
    embedding = 4000 * 256 * 4 + 300_000  # its rows come in as tokens need them, and pages beside them
    assert mapped_bytes(file) < embedding
    tokens = tuple(range(10, 40))
    (found,) = engine.forward(Batch((Segment(SeqId(1), 0, tokens),))).dists[0]
    assert mapped_bytes(file) < embedding
    plain = load_engine(tmp_path, EngineOptions(backend="hf", dtype="float32", device="cpu"), name="m")
    (expected,) = plain.forward(Batch((Segment(SeqId(1), 0, tokens),))).dists[0]
    assert found.argmax() == expected.argmax()
    assert found.probs == pytest.approx(expected.probs, abs=1e-5)


def test_a_mapping_with_written_pages_stays_as_it_is(tmp_path: Path) -> None:
    """Another user of the file may have changed its tensors in place; those changes are in no file."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(200_000)}, file)
    with safe_open(file, framework="pt") as opened:
        weight = opened.get_tensor("weight")
    weight[70_000] = 5.0
    release_mapped_weights(nn.Linear(2, 2))
    assert weight[70_000] == 5.0 and weight.sum() == 200_004.0


def test_rows_of_an_embedding_do_not_stay(tmp_path: Path) -> None:
    """Each brings its neighbours in: a few hundred requests would bring all of it."""
    file = tmp_path / "model.safetensors"
    count, width = 20_000, 512
    save_file({"weight": torch.arange(count * width, dtype=torch.float32).view(count, width)}, file)
    with safe_open(file, framework="pt") as opened:
        embedding = nn.Embedding(count, width, _weight=opened.get_tensor("weight"))
    release_mapped_weights(embedding)
    rows = torch.arange(0, count, 40)
    most = 0
    for some in rows.split(50):
        with torch.inference_mode():
            found = embedding(some)
        most = max(most, mapped_bytes(file))
        assert found[:, 0].tolist() == [float(row * width) for row in some.tolist()]
    assert 0 < most < count * width * 4 / 2
