"""One engine of each kind and architecture, made once and shared; tests use fresh sequences and release them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.core.batching.segment import SeqId
from paceline.engine.base import Engine
from paceline.engine.fake.engine import FakeEngine, noisy
from paceline.engine.loader import EngineOptions, load_engine, quiet
from tests.engine import checkpoints
from tests.engine.checkpoints import ARCHITECTURES

KV_ROWS = 2048
SUBJECTS = [
    "fake",
    "fake-order-3",
    "fake-noisy",
    "fake-wide",
    *(f"{backend}-{name}" for backend in ("hf", "paged") for name in ARCHITECTURES),
]
SUBJECTS += ["recompute-llama"]


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
            return HFEngine(AutoModelForCausalLM.from_pretrained(checkpoint(name)), info, recompute=True)
    options = EngineOptions(backend="hf" if backend == "hf" else "paged", kv_rows=KV_ROWS)
    return load_engine(checkpoint(name), options, name=name)


@pytest.fixture(scope="session", params=SUBJECTS)
def engine(request: pytest.FixtureRequest, load: Callable[[str], Engine]) -> Engine:
    engine = load(request.param)
    assert engine.info.backend == request.param.split("-")[0].replace("recompute", "hf")
    return engine


_ids = itertools.count(1)


@pytest.fixture
def fresh() -> Callable[[], SeqId]:
    """Sequence ids never used before."""
    return lambda: SeqId(next(_ids))
