"""A step of a 7B model on a GPU against what its memory allows: part of `engine`, where there is a GPU.

A step is a forward of one row of each sequence and the sampling of its tokens, until they are on the host. Its limit is
the time in which the device's memory delivers what the step must read: the weights once, and K and V of every cached
row. `python -m bench.engine --gpu` measures this alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import ModelInfo, SampleRequest
from paceline.engine.paged.attention.backends import Attention
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.errors import EngineError

from .random_model import Shape as ModelShape
from .random_model import random_model
from .report import Claim

QWEN_7B = ModelShape(
    layers=28, hidden=3584, inner=18944, heads=28, kv_heads=4, vocab=152_064, positions=4096, tied=False
)
ABSENT = "not measured: no GPU here"


@dataclass(frozen=True, slots=True)
class Load:
    """64 sequences of 2,048 rows: 15 GB of weights and 8 GB of K and V."""

    model: ModelShape = QWEN_7B
    dtype: torch.dtype = torch.bfloat16
    context: int = 2048
    batches: Sequence[tuple[int, float]] = ((1, 1.5), (64, 2.0))  # sequences, and the aim over the limit
    steps: int = 40
    warm_up: int = 8
    copied: int = 1 << 30  # bytes, of the copy that measures the memory

    @property
    def row_bytes(self) -> int:
        """K and V of one row, all layers."""
        model = self.model
        return 2 * model.layers * model.kv_heads * (model.hidden // model.heads) * self.dtype.itemsize


class HostCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts copies of at least `numbers` numbers from another device to the host."""

    def __init__(self, numbers: int, host: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._numbers, self._host = numbers, host
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        source = args[-1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        if isinstance(source, torch.Tensor) and isinstance(found, torch.Tensor) and source.device != found.device:
            self.count += found.device.type == self._host and source.numel() >= self._numbers
        return found


def measure(
    load: Load, device: torch.device, *, attention: Attention | None = None
) -> tuple[list[dict[str, object]], list[Claim]]:
    """Rows and claims. attention: None is the device's own."""
    engine, weight_bytes = _engine(load, device, attention)
    rate = _read_rate(load.copied, device)
    rows: list[dict[str, object]] = []
    claims: list[Claim] = []
    copies = 0
    for sequences, aim in load.batches:
        seqs = [SeqId(number) for number in range(sequences)]
        for seq in seqs:
            prompt = tuple((31 * int(seq) + 7 * i) % load.model.vocab for i in range(load.context))
            engine.forward(Batch((Segment(seq, 0, prompt, logits="none"),)))
        steps = [_step(engine, seqs, load.model.vocab, device) for _ in range(load.warm_up + load.steps)]
        steps = steps[load.warm_up :]
        with HostCopies(load.model.vocab) as counted:
            _step(engine, seqs, load.model.vocab, device)
        copies += counted.count
        for seq in seqs:
            engine.release(seq)
        limit = 1e3 * (weight_bytes + sequences * load.context * load.row_bytes) / rate
        step_ms = statistics.median(total for total, _ in steps)
        rows.append(
            {
                "sequences": sequences,
                "context": load.context,
                "step_ms": step_ms,
                "step_low_ms": min(total for total, _ in steps),
                "step_high_ms": max(total for total, _ in steps),
                "forward_ms": statistics.median(forward for _, forward in steps),
                "limit_ms": limit,
                "over_limit": step_ms / limit,
                "read_gb_per_s": rate / 1e9,
                "vocabulary_rows_to_host": counted.count,
                "attention": engine.attention,
                "graphs": 0 if engine.graphs is None else sum(map(bool, engine.graphs.replays.values())),
            }
        )
        claims.append(Claim(f"engine.gpu_step_{sequences}_over_limit", step_ms / limit, aim, "lower"))
    claims.append(Claim("engine.gpu_vocabulary_rows_to_host", copies, 0, "lower"))
    return rows, claims


def conditions(load: Load) -> Mapping[str, object]:
    model = load.model
    return {
        "gpu_model": f"random Qwen2, hidden {model.hidden}, {model.layers} layers, vocabulary {model.vocab}",
        "gpu_dtype": str(load.dtype).removeprefix("torch."),
        "gpu_statistic": f"median of {load.steps} steps, greedy",
        "gpu_limit": "(weights + K and V of all rows) / bytes a second of a plain copy, read and written",
    }


def _engine(load: Load, device: torch.device, attention: Attention | None) -> tuple[PagedEngine, int]:
    """An engine, and the bytes of weights that a step reads: all but the input embedding."""
    with device:
        model = random_model(load.model, load.dtype)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    read = sum(weight.nbytes for weight in model.parameters()) - embedding.nbytes
    most = max(sequences for sequences, _ in load.batches)
    info = ModelInfo("bench", "", load.model.vocab, load.context * 2, str(load.dtype), "paged")
    rows = most * (load.context + load.steps + load.warm_up + 32)
    graphs = None if device.type == "cuda" else True
    engine = paged_engine(model, info, kv_rows=rows, attention=attention, graphs=graphs)
    if not isinstance(engine, PagedEngine):
        raise EngineError(f"paged does not serve the bench's model: {engine}")
    return engine, read


def _step(engine: PagedEngine, seqs: Sequence[SeqId], vocab: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the step, and of its forward as far as the host launches it."""
    _finish(device)
    begin = time.perf_counter()
    batch = Batch(tuple(Segment(seq, engine.length(seq), (int(seq) % vocab,)) for seq in seqs))
    output = engine.forward(batch)
    launched = time.perf_counter()
    greedy = SamplingParams(temperature=0.0)
    engine.sample(
        [
            SampleRequest(((logits,),), (RowSampling(greedy, position=engine.length(seq), vocab_size=vocab),))
            for seq, logits in zip(seqs, output.logits, strict=True)
        ]
    )
    return 1e3 * (time.perf_counter() - begin), 1e3 * (launched - begin)


def _read_rate(size: int, device: torch.device) -> float:
    """Bytes a second that a plain copy reads and writes together: what the memory delivers."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    times: list[float] = []
    for _ in range(8):
        _finish(device)
        begin = time.perf_counter()
        into.copy_(source)
        _finish(device)
        times.append(time.perf_counter() - begin)
    return 2 * size / statistics.median(times[2:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
