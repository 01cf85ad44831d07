"""One engine of each kind and architecture, made once and shared; tests use fresh sequences and release them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from paceline.core.batching.segment import SeqId
from paceline.engine.base import Engine
from paceline.engine.fake.engine import FakeEngine, noisy
from paceline.engine.loader import EngineOptions, load_engine, quiet
from paceline.engine.paged.attention.backends import AttentionName
from paceline.engine.pipeline_stage import load_stage
from paceline.engine.stage_pipeline import StagePipeline
from tests.engine import checkpoints
from tests.engine.blocking import Blocking
from tests.engine.checkpoints import ARCHITECTURES

KV_ROWS = 2048
# `TEST_DEVICE=cuda:0 python -m pytest tests/engine` runs the engines there, with the attention and the graphs of a GPU.
DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
HERE = EngineOptions(dtype="float32", device=str(DEVICE))
# `TEST_ATTENTION=triton` runs Triton's kernels in its interpreter where there is no GPU: an hour for all architectures.
TILED = cast("AttentionName", os.environ.get("TEST_ATTENTION", "twin" if DEVICE.type == "cpu" else "triton"))
SUBJECTS = [
    "fake",
    "fake-order-3",
    "fake-noisy",
    "fake-wide",
    *(f"{backend}-{name}" for backend in ("hf", "paged", "tiled") for name in ARCHITECTURES),
]
SUBJECTS += ["recompute-llama", "stages-llama", "stages-gemma2"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of an architecture's checkpoint."""
    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()

    def find(name: str) -> Path:
        if name not in made:
            with quiet():
                config = checkpoints.recurrent() if name == "mamba" else ARCHITECTURES[name]()
                made[name] = checkpoints.save(config, root / name)
        return made[name]

    return find


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Callable[[str], Engine]:
    """An engine by its name in SUBJECTS."""
    made: dict[str, Engine] = {}

    def find(subject: str) -> Engine:
        if subject not in made:
            made[subject] = _made(subject, checkpoint)
        return made[subject]

    return find


def _made(subject: str, checkpoint: Callable[[str], Path]) -> Engine:
    if subject.startswith("fake"):
        order, vocab_size = 3 if subject == "fake-order-3" else None, 2048 if subject == "fake-wide" else 257
        engine = FakeEngine(seed=3, order=order, max_positions=checkpoints.POSITIONS, vocab_size=vocab_size)
        return noisy(engine, 0.5) if subject == "fake-noisy" else engine
    backend, name = subject.split("-")
    if backend == "recompute":
        from transformers import AutoModelForCausalLM

        from paceline.engine.hf import HFEngine

        info = load_engine(checkpoint(name), EngineOptions(backend="hf"), name=name).info
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(checkpoint(name)).to(DEVICE)
            return HFEngine(model, info, recompute=True)
    if backend == "stages":
        return Blocking(staged(checkpoint(name)))
    options = HERE._replace(backend="hf" if backend == "hf" else "paged", kv_rows=KV_ROWS)
    if backend == "tiled":  # a GPU's way to run a step, its kernels' twin and plain calls in place of graphs on a CPU
        options = options._replace(attention=TILED, graphs=True)
    return load_engine(checkpoint(name), options, name=name)


def staged(directory: Path, kv_rows: int = KV_ROWS) -> StagePipeline:
    """The model in stages of a layer each."""
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    options = HERE._replace(kv_rows=kv_rows)
    return StagePipeline([load_stage(directory, first, first + 1, options) for first in range(layers)])


@pytest.fixture(scope="session", params=SUBJECTS)
def engine(request: pytest.FixtureRequest, load: Callable[[str], Engine]) -> Engine:
    engine = load(request.param)
    backend = request.param.split("-")[0]
    assert engine.info.backend == {"recompute": "hf", "tiled": "paged", "stages": "paged"}.get(backend, backend)
    return engine


_ids = itertools.count(1)


@pytest.fixture
def fresh() -> Callable[[], SeqId]:
    """Sequence ids never used before."""
    return lambda: SeqId(next(_ids))
