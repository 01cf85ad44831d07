"""Time of one forward: `paged`, transformers' and llama.cpp's own forward, alternating, on a random-weight 0.5B model.

Claims: a one-row forward against transformers' and llama.cpp's, 16 rows against one row and against llama.cpp's. All
times end with the logits of all rows; the time of converting them to distributions is `distributions_ms`. llama.cpp
is measured where llama-cpp-python is installed. On a GPU a step of a 7B model is measured too (`gpu_step`).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import Logits, ModelInfo
from paceline.engine.model_config import cache_input
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.engine.weights import served_dtype
from paceline.errors import ConfigError, EngineError

from . import gpu_step
from .bootstrap import INSIDE, Estimate, medians_apart, ratio_of
from .findings import claimed
from .llama_cpp_forward import llama_cpp, missing
from .plots import lines
from .random_model import Shape, random_model
from .report import Claim, Options, Report

NAME: Final = "engine"
SUMMARY: Final = "ms per forward at 1-64 rows, and GB/s beside a plain copy's; baselines: transformers, llama.cpp"

STORED: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the model and of the measurement."""

    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    rounds: int = 15
    prefix: int = 128  # rows cached before each timed forward
    shape: Shape = field(default_factory=Shape)
    dtype: torch.dtype | None = None  # None: in which a server would run it here, from a checkpoint in `STORED`
    copied: int = 1 << 28  # bytes of the plain copy: more than any CPU cache


QUICK = Workload(rows=(1, 4, 16), rounds=5)


def run(options: Options, workload: Workload | None = None) -> Report:
    """Times are medians. Data sets are not used: speed does not depend on the weights."""
    report = _against_others(options, workload)
    if not torch.cuda.is_available():
        return replace(report, conditions=dict(report.conditions) | {"gpu_step": gpu_step.ABSENT})
    torch.cuda.empty_cache()  # of the models that were compared
    ours = run_gpu()
    conditions = dict(report.conditions) | dict(ours.conditions)
    return Report(NAME, conditions, [*report.rows, *ours.rows], [*report.claims, *ours.claims])


def run_gpu() -> Report:
    """The step of a 7B model alone. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("There is no GPU here that torch can use, so a GPU's steps were not measured.")
    load = gpu_step.Load()
    rows, claims = gpu_step.measure(load, torch.device("cuda", torch.cuda.current_device()))
    return Report(NAME, gpu_step.conditions(load), rows, claims)


def _against_others(options: Options, workload: Workload | None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(load.shape, STORED)
    stored_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    dtype = load.dtype or served_dtype(device, STORED, stored_bytes)[0]
    torch.nn.Module.to(model, device, dtype)
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    reference = _Transformers(copy.deepcopy(model), load)
    ours = _Paged(model, load)
    copy_rate = _copy_rate(load.copied, device)
    lacking = "it was not asked to use this GPU" if device.type != "cpu" else missing()
    measured: dict[int, _Forwards] = {}
    with ExitStack() as started:
        other = None if lacking else started.enter_context(llama_cpp(load.shape, load.prefix, max(load.rows)))
        for rows in load.rows:
            calls = [partial(reference.forward, rows), partial(ours.forward, rows), partial(ours.distributions, rows)]
            calls += [] if other is None else [partial(other.forward, rows)]
            measured[rows] = _Forwards(*_interleaved(calls, load.rounds, device))
    claims, intervals = _claims(measured)
    conditions = {
        "model": f"random Qwen2, hidden {load.shape.hidden}, {load.shape.layers} layers, vocabulary {load.shape.vocab}",
        "dtype": str(dtype).removeprefix("torch."),
        "stored": str(STORED).removeprefix("torch."),
        "dtype_is": "as served here" if load.dtype is None else "as asked",
        "weights_mb": round(weight_bytes / 1e6),
        "cached_rows": load.prefix,
        "statistic": f"medians of {load.rounds} rounds; a claim is the median ratio of two forwards of one round, but "
        "rows16_vs_row1, of two series, is the ratio of their medians",
        "llama_cpp": lacking or f"llama-cpp-python {version('llama-cpp-python')}",
        f"interval_{100 * INSIDE:.0f}": {name: estimate.interval for name, estimate in intervals.items()},
        "transformers_attention": str(reference.attention),
        "copy_counts": "bytes read and bytes written",
        "clock": "real",
        "quick": options.quick,
    }
    table = [
        {"dtype": conditions["dtype"]} | each.row(count, weight_bytes, copy_rate) for count, each in measured.items()
    ]
    return Report(NAME, conditions, table, claims)


@dataclass(frozen=True, slots=True)
class _Forwards:
    """Milliseconds of the rounds of one number of rows."""

    transformers: Sequence[float]
    paged: Sequence[float]
    with_dists: Sequence[float]
    llama_cpp: Sequence[float] | None = None

    def row(self, rows: int, weight_bytes: int, copy_gb_per_s: float) -> dict[str, object]:
        plain, paged = statistics.median(self.transformers), statistics.median(self.paged)
        llama = {} if self.llama_cpp is None else {"llama_cpp_ms": statistics.median(self.llama_cpp)}
        return {
            "rows": rows,
            "transformers_ms": plain,
            "transformers_low_ms": min(self.transformers),
            "transformers_high_ms": max(self.transformers),
            "paged_ms": paged,
            "paged_low_ms": min(self.paged),
            "paged_high_ms": max(self.paged),
            **llama,
            "times_faster": plain / paged,
            "distributions_ms": max(0.0, statistics.median(self.with_dists) - paged),
            "weights_gb_per_s": weight_bytes / paged / 1e6,
            "copy_gb_per_s": copy_gb_per_s,
        }


def _claims(measured: Mapping[int, _Forwards]) -> tuple[list[Claim], dict[str, Estimate]]:
    """Claims, and the intervals of those whose two forwards lie in one round."""
    one, sixteen = measured[1], measured[16]
    ratios = {"engine.vs_transformers": (ratio_of(one.transformers, one.paged), 1.6)}
    if one.llama_cpp is not None and sixteen.llama_cpp is not None:
        ratios["engine.vs_llama_cpp_row1"] = (ratio_of(one.llama_cpp, one.paged), 1.05)
        ratios["engine.vs_llama_cpp_row16"] = (ratio_of(sixteen.llama_cpp, sixteen.paged), 2.2)
    claims = [claimed(name, found, target, "higher") for name, (found, target) in ratios.items()]
    claims.append(claimed("engine.rows16_vs_row1", medians_apart(sixteen.paged, one.paged), 1.3, "lower"))
    return claims, {name: estimate for name, (estimate, _) in ratios.items()}


def plot(report: Report) -> str:
    return lines(report.rows, x="rows", ys=("transformers_ms", "paged_ms"), unit="ms per forward", title=NAME)


class _Transformers:
    """The model's own forward with transformers' KV cache."""

    def __init__(self, model: PreTrainedModel, load: Workload) -> None:
        self._model, self._cache = model, DynamicCache()
        self.attention = model.config._attn_implementation
        self._ids = torch.arange(max(*load.rows, load.prefix), device=model.device)[None] % load.shape.vocab
        with torch.inference_mode():
            self._run(self._ids[:, : load.prefix])

    def forward(self, rows: int) -> None:
        with torch.inference_mode():
            self._run(self._ids[:, :rows])
        self._cache.crop(-rows)

    def _run(self, ids: torch.Tensor) -> None:
        self._model(input_ids=ids, use_cache=True, **{cache_input(self._model): self._cache})


class _Paged:
    def __init__(self, model: PreTrainedModel, load: Workload) -> None:
        info = ModelInfo("bench", "", load.shape.vocab, 4096, str(model.dtype), "paged")
        engine = paged_engine(model, info, kv_rows=1024)
        if not isinstance(engine, PagedEngine):
            raise EngineError(f"paged does not serve the bench's model: {engine}")
        self._engine, self._seq, self._prefix, self._vocab = engine, SeqId(0), load.prefix, load.shape.vocab
        engine.forward(Batch((Segment(self._seq, 0, tuple(i % load.shape.vocab for i in range(load.prefix))),)))

    def _logits(self, rows: int) -> Logits:
        tokens = tuple(i % self._vocab for i in range(rows))
        (logits,) = self._engine.forward(Batch((Segment(self._seq, self._prefix, tokens, logits="all"),))).logits
        self._engine.truncate(self._seq, self._prefix)
        return logits

    def forward(self, rows: int) -> None:
        self._logits(rows)

    def distributions(self, rows: int) -> None:
        self._logits(rows).dists()


def _interleaved(calls: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[list[float]]:
    """Milliseconds of each call, by round; one of each a round, so that a change of the machine's speed affects all."""
    taken: list[list[float]] = [[] for _ in calls]
    for round_index in range(rounds + 1):
        for times, call in zip(taken, calls, strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_index:  # the first round is a warm-up
                times.append(1e3 * (time.perf_counter() - start))
    return taken


def _copy_rate(size: int, device: torch.device) -> float:
    """GB/s of copying `size` bytes, read and written bytes together."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    (taken,) = _interleaved([lambda: into.copy_(source)], 5, device)
    return 2 * source.numel() / statistics.median(taken) / 1e6


def main() -> None:
    """`python -m bench.engine [--quick | --gpu] [--json FILE]`; `paceline bench engine` does the same."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--gpu", action="store_true", help="the step of a 7B model on this machine's GPU alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    arguments = parser.parse_args()
    try:
        report = run_gpu() if arguments.gpu else run(Options(quick=arguments.quick))
    except ConfigError as error:
        sys.exit(str(error))
    if arguments.json:
        report.write(arguments.json)
    sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
