"""Time of one forward: `paged` and transformers' own forward, alternating, on a random-weight 0.5B model.

Claims: a one-row forward at least 1.5 times as fast as transformers', and 16 rows at most 1.3 times one row. Both
times end with the logits of all rows; the time of converting them to distributions is `distributions_ms`. On a GPU a
step of a 7B model is measured too (`gpu_step`).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.base import ModelInfo
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.engine.tensors import dists
from paceline.errors import ConfigError, EngineError

from . import gpu_step
from .random_model import Shape, random_model
from .report import Claim, Options, Report, plot_lines

NAME: Final = "engine"
SUMMARY: Final = "ms per forward at 1-64 rows, and GB/s beside a plain copy's; baseline: transformers"


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the model and of the measurement."""

    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    rounds: int = 15
    prefix: int = 128  # rows cached before each timed forward
    shape: Shape = field(default_factory=Shape)
    dtype: torch.dtype = torch.bfloat16
    copied: int = 1 << 28  # bytes of the plain copy: more than any CPU cache


QUICK = Workload(rows=(1, 4, 16), rounds=5)


def run(options: Options, workload: Workload | None = None) -> Report:
    """Times are medians. Data sets are not used: speed does not depend on the weights."""
    report = _against_transformers(options, workload)
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


def _against_transformers(options: Options, workload: Workload | None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    model = random_model(load.shape, load.dtype)
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    device = model.device
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    reference = _Transformers(copy.deepcopy(model), load)
    ours = _Paged(model, load)
    copy_rate = _copy_rate(load.copied, device)
    measured: dict[int, dict[str, float]] = {}
    for rows in load.rows:
        calls = [partial(reference.forward, rows), partial(ours.forward, rows), partial(ours.distributions, rows)]
        plain, paged, with_dists = _interleaved(calls, load.rounds, device)
        measured[rows] = {
            "rows": rows,
            "transformers_ms": plain.median,
            "transformers_low_ms": plain.low,
            "transformers_high_ms": plain.high,
            "paged_ms": paged.median,
            "paged_low_ms": paged.low,
            "paged_high_ms": paged.high,
            "times_faster": plain.median / paged.median,
            "distributions_ms": max(0.0, with_dists.median - paged.median),
            "weights_gb_per_s": weight_bytes / paged.median / 1e6,
            "copy_gb_per_s": copy_rate,
        }
    claims = [
        Claim("engine.vs_transformers", measured[1]["times_faster"], 1.5, "higher"),
        Claim("engine.rows16_vs_row1", measured[16]["paged_ms"] / measured[1]["paged_ms"], 1.3, "lower"),
    ]
    conditions = {
        "model": f"random Qwen2, hidden {load.shape.hidden}, {load.shape.layers} layers, vocabulary {load.shape.vocab}",
        "dtype": str(load.dtype).removeprefix("torch."),
        "weights_mb": round(weight_bytes / 1e6),
        "cached_rows": load.prefix,
        "statistic": f"median of {load.rounds} rounds",
        "transformers_attention": str(reference.attention),
        "copy_counts": "bytes read and bytes written",
        "clock": "real",
        "quick": options.quick,
    }
    return Report(NAME, conditions, list(measured.values()), claims)


def plot(report: Report, file: Path) -> None:
    plot_lines(report, file, x="rows", ys=("transformers_ms", "paged_ms"), unit="ms per forward")


class _Transformers:
    """The model's own forward with transformers' KV cache."""

    def __init__(self, model: PreTrainedModel, load: Workload) -> None:
        self._model, self._cache = model, DynamicCache()
        self.attention = model.config._attn_implementation
        self._ids = torch.arange(max(*load.rows, load.prefix), device=model.device)[None] % load.shape.vocab
        with torch.inference_mode():
            model(input_ids=self._ids[:, : load.prefix], past_key_values=self._cache, use_cache=True)

    def forward(self, rows: int) -> None:
        with torch.inference_mode():
            self._model(input_ids=self._ids[:, :rows], past_key_values=self._cache, use_cache=True)
        self._cache.crop(-rows)


class _Paged:
    def __init__(self, model: PreTrainedModel, load: Workload) -> None:
        info = ModelInfo("bench", "", load.shape.vocab, 4096, str(load.dtype), "paged")
        engine = paged_engine(model, info, kv_rows=1024)
        if not isinstance(engine, PagedEngine):
            raise EngineError(f"paged does not serve the bench's model: {engine}")
        self._engine, self._seq, self._prefix, self._vocab = engine, SeqId(0), load.prefix, load.shape.vocab
        engine.forward(Batch((Segment(self._seq, 0, tuple(i % load.shape.vocab for i in range(load.prefix))),)))

    def _scores(self, rows: int) -> torch.Tensor:
        tokens = tuple(i % self._vocab for i in range(rows))
        scores = self._engine.scores(Batch((Segment(self._seq, self._prefix, tokens, logits="all"),)))
        self._engine.truncate(self._seq, self._prefix)
        return scores

    def forward(self, rows: int) -> None:
        self._scores(rows)

    def distributions(self, rows: int) -> None:
        dists(self._scores(rows))


class _Times(NamedTuple):
    """Milliseconds"""

    median: float
    low: float
    high: float


def _interleaved(calls: Sequence[Callable[[], object]], rounds: int, device: torch.device) -> list[_Times]:
    """Times of each call. One of each per round, so that a change of the machine's speed affects all alike."""
    taken: list[list[float]] = [[] for _ in calls]
    for round_index in range(rounds + 1):
        for times, call in zip(taken, calls, strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if round_index:  # the first round is a warm-up
                times.append(1e3 * (time.perf_counter() - start))
    return [_Times(statistics.median(times), min(times), max(times)) for times in taken]


def _copy_rate(size: int, device: torch.device) -> float:
    """GB/s of copying `size` bytes, read and written bytes together."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    (taken,) = _interleaved([lambda: into.copy_(source)], 5, device)
    return 2 * source.numel() / taken.median / 1e6


def main() -> None:
    """`python -m bench.engine [--quick | --gpu] [--json FILE] [--plot FILE]`; `paceline bench engine` does the same."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--gpu", action="store_true", help="the step of a 7B model on this machine's GPU alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the graph there")
    arguments = parser.parse_args()
    try:
        report = run_gpu() if arguments.gpu else run(Options(quick=arguments.quick))
    except ConfigError as error:
        sys.exit(str(error))
    if arguments.json:
        report.write(arguments.json)
    if arguments.plot and not arguments.gpu:
        plot(report, arguments.plot)
    sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")


if __name__ == "__main__":
    main()
