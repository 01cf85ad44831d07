"""One engine of each kind and architecture, made once and shared; tests use fresh sequences and release them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
from gguf import GGMLQuantizationType

from lab.engines import WrappedEngine
from lab.torch_kernels import TorchKernels
from paceline.core.batching.segment import Batch
from paceline.engine import weights
from paceline.engine.base import AsyncEngine, Engine, Output
from paceline.engine.fake import FakeEngine
from paceline.engine.llama_cpp.engine import load_gguf
from paceline.engine.loader import EngineOptions, load_engine, load_model, quiet
from paceline.engine.paged.attention.backends import Attention
from paceline.engine.stage import num_layers
from paceline.hub.gguf import described
from paceline.models import READER
from paceline.runtime.identity import PrivateKey
from paceline.runtime.stages.pipeline import RemotePipeline
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim
from server.stages import StagesWanted, open_stages
from tests.engine import checkpoints
from tests.engine.checkpoints import ARCHITECTURES
from tests.forked import USUAL, starting
from tests.hub.test_gguf import write_gguf
from tests.runtime.stages.rig import even_spans, rig
from tests.slow import slow_in

CONTRACT = "test_contract.py"  # of all engines; `make check` runs it with the fake one
pytest_collection_modifyitems = slow_in(__file__, unless=lambda case: CONTRACT not in case or "fake" in case)
KV_ROWS = 2048
# `TEST_DEVICE=cuda:0 python -m pytest tests/engine` runs the engines there, with the attention and the graphs of a GPU.
DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
HERE = EngineOptions(dtype="float32", device=str(DEVICE))
# `TEST_ATTENTION=triton` runs Triton's kernels in its interpreter where there is no GPU: an hour for all architectures.
TILED: Attention = TorchKernels() if os.environ.get("TEST_ATTENTION", DEVICE.type) == "cpu" else "triton"
# Every architecture's scores are tried on every backend; the contract, where rows see others by another rule.
FORMATS = [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1]  # on llama.cpp
SUBJECTS = ["fake", "fake-order-3", "fake-wide"]
SUBJECTS += [f"hf-{name}" for name in ("llama", "gemma2", "opt")]
SUBJECTS += [f"paged-{name}" for name in ("llama", "mistral", "gemma2", "opt", "mixtral")]
SUBJECTS += ["tiled-llama", "tiled-gemma2", "stored-gemma3", "stored-qwen3moe"]
SUBJECTS += [f"{kind.name.lower()}-llama" for kind in FORMATS]
SUBJECTS += ["recompute-llama", "stages-llama", "processes-llama", "reader"]
# `TEST_GGUF=FILE` runs the contract with a real model on llama.cpp as well: minutes for 135 million weights.
SUBJECTS += ["gguf"] if "TEST_GGUF" in os.environ else []


class Blocking(WrappedEngine):
    """An asynchronous engine with one batch under way: as an `Engine`, so that it obeys the same properties."""

    def __init__(self, inner: AsyncEngine) -> None:
        super().__init__(cast(Engine, inner))  # all but `forward` is the same
        self._runner = inner

    def forward(self, batch: Batch) -> Output:
        return self._runner.collect(self._runner.submit(batch))


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
        """name: an architecture, or `half-` and one whose weights are in bfloat16"""
        if name not in made:
            architecture, dtype = name.removeprefix("half-"), torch.bfloat16 if "-" in name else torch.float32
            with quiet():
                config = checkpoints.recurrent() if name == "mamba" else ARCHITECTURES[architecture]()
                made[name] = checkpoints.save(config, root / name, dtype=dtype)
        return made[name]

    return find


@pytest.fixture(scope="session")
def load(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Iterator[Callable[[str], Engine]]:
    """An engine by its name in SUBJECTS."""
    made: dict[str, Engine] = {}
    with ExitStack() as opened:

        def find(subject: str) -> Engine:
            if subject not in made:
                forks = request.getfixturevalue("forked") if subject.startswith("processes") else USUAL
                with starting(forks):
                    made[subject] = _made(subject, checkpoint, opened)
            return made[subject]

        yield find


def _made(subject: str, checkpoint: Callable[[str], Path], opened: ExitStack) -> Engine:
    if subject.startswith("fake"):
        order, vocab_size = 3 if subject == "fake-order-3" else None, 2048 if subject == "fake-wide" else 257
        return FakeEngine(seed=3, order=order, max_positions=checkpoints.POSITIONS, vocab_size=vocab_size)
    if subject == "gguf":
        return load_gguf(
            described(Path(os.environ["TEST_GGUF"])), name=subject, kv_rows=34 * 256, threads=1, streams=34
        )
    if subject == "reader":
        return load_engine(READER, HERE, name=subject)
    backend, name = subject.split("-")
    if backend in (kind.name.lower() for kind in FORMATS):
        return gguf_engine(checkpoint(name), GGMLQuantizationType[backend.upper()])
    if backend == "recompute":
        from transformers import AutoModelForCausalLM

        from paceline.engine.hf import HFEngine

        info = load_engine(checkpoint(name), EngineOptions(backend="hf"), name=name).info
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(checkpoint(name)).to(DEVICE)
            return HFEngine(model, info, recompute=True)
    if backend == "stages":
        return Blocking(opened.enter_context(staged(checkpoint(name))))
    if backend == "processes":
        return Blocking(opened.enter_context(closing(in_processes(checkpoint(name)))))
    if backend == "stored":
        return load_stored(checkpoint(f"half-{name}"), name, HERE._replace(kv_rows=KV_ROWS))
    options = HERE._replace(backend="hf" if backend == "hf" else "paged", kv_rows=KV_ROWS)
    if backend == "tiled":  # a GPU's way to run a step, its kernels' twin and plain calls in place of graphs on a CPU
        options = options._replace(attention=TILED, graphs=True)
    return load_engine(checkpoint(name), options, name=name)


def load_stored(directory: Path, name: str, options: EngineOptions = HERE) -> Engine:
    """The engine of a checkpoint in half precision as on a processor that computes in float32 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "computes_bfloat16", lambda: False)
        patch.setattr(weights, "_SMALL_MODEL", 0)  # or it would be converted when it is read
        return load_engine(directory, options._replace(device="cpu", dtype="auto"), name=name)


def gguf_engine(folder: Path, kind: GGMLQuantizationType, threads: int = 1) -> Engine:
    """The model of a folder in a GGUF file of this format, on llama.cpp."""
    file = folder.with_name(f"{folder.name}-{kind.name}.gguf")
    write_gguf(folder, file, kind=kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.with_name("cache")))
        return load_model(file, backend="llama_cpp", kv_rows=34 * checkpoints.POSITIONS, threads=threads).engine


@contextmanager
def staged(directory: Path) -> Iterator[RemotePipeline]:
    """The model in stages of a layer each, on threads of this process."""
    layers = num_layers(directory)
    with rig(directory, even_spans(layers, layers), options=HERE._replace(kv_rows=KV_ROWS)) as made:
        yield made.pipeline


def in_processes(directory: Path, count: int = 2) -> RemotePipeline:
    """The model in stages that are processes of this machine."""

    async def nobody(_: Claim) -> CloseCode:
        return CloseCode.BAD_CREDENTIAL

    options = HERE._replace(kv_mib=16, threads=1)
    return open_stages(
        directory, StagesWanted(count), name="staged", key=PrivateKey.generate(), admit=nobody, options=options
    )


@pytest.fixture(scope="session", params=SUBJECTS)
def engine(request: pytest.FixtureRequest, load: Callable[[str], Engine]) -> Engine:
    engine = load(request.param)
    backend = request.param.split("-")[0]
    kind = {"recompute": "hf", "tiled": "paged", "stored": "paged", "stages": "paged", "processes": "paged"}
    kind |= {"gguf": "llama_cpp", **{each.name.lower(): "llama_cpp" for each in FORMATS}}
    assert engine.info.backend == kind.get(backend, backend)
    return engine
