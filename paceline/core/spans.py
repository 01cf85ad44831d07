"""Plan of a pipeline: which layers each stage gets, from its measured speed and its memory. Pure.

The slowest stage sets the pace of a pipeline that is kept full, so the plan minimises the longest time of a stage; of
plans with that time, it takes the one whose sum is least. Exact, by dynamic programming over (stages, layers). Stages
keep their given order. Links between them are not weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """One stage's machine: what a layer costs there."""

    layer_s: float  # time of one layer's forward of one row
    head_s: float = 0.0  # likewise of the final norm and the scores; of the last stage alone
    free_bytes: int | None = None  # memory for weights; None: enough


@dataclass(frozen=True, slots=True)
class ModelSize:
    layers: int
    layer_bytes: int = 0
    embedding_bytes: int = 0  # of the first stage
    head_bytes: int = 0  # of the last stage


@dataclass(frozen=True, slots=True)
class Span:
    """Layers `first` to `stop` - 1, and what they take."""

    first: int
    stop: int
    seconds: float
    num_bytes: int


def plan_spans(model: ModelSize, stages: Sequence[StageSpeed]) -> list[Span]:
    """A span of at least one layer for every stage, in order. Raises ConfigError with a sentence if there is none."""
    if not stages or len(stages) > model.layers:
        raise ConfigError(
            f"{len(stages)} stages cannot share {model.layers} layers: each stage needs at least one, so give "
            f"1 to {model.layers} stages."
        )
    best: list[tuple[float, float, tuple[Span, ...]] | None] = [(0.0, 0.0, ())] + [None] * model.layers
    for number, stage in enumerate(stages):
        after: list[tuple[float, float, tuple[Span, ...]] | None] = [None] * (model.layers + 1)
        for first, before in enumerate(best):
            if before is None:
                continue
            for stop in range(first + 1, model.layers - (len(stages) - number - 1) + 1):
                span = _span(model, stage, first, stop, is_last=number == len(stages) - 1)
                if stage.free_bytes is not None and span.num_bytes > stage.free_bytes:
                    break
                found = (max(before[0], span.seconds), before[1] + span.seconds, (*before[2], span))
                known = after[stop]
                if known is None or found[:2] < known[:2]:
                    after[stop] = found
        best = after
    whole = best[model.layers]
    if whole is None:
        needed = model.layers * model.layer_bytes + model.embedding_bytes + model.head_bytes
        free = sum(stage.free_bytes or 0 for stage in stages)
        raise ConfigError(
            f"The model's weights take {_mib(needed)} MiB and do not fit: {len(stages)} stages have {_mib(free)} MiB "
            "free together. Add a stage, or free memory."
        )
    return list(whole[2])


def describe_plan(spans: Sequence[Span]) -> list[str]:
    """One line for each stage."""
    return [
        f"stage {number}: layers {span.first}:{span.stop}, {span.seconds * 1e3:.2f} ms a row, "
        f"{_mib(span.num_bytes)} MiB of weights"
        for number, span in enumerate(spans, 1)
    ]


def _span(model: ModelSize, stage: StageSpeed, first: int, stop: int, *, is_last: bool) -> Span:
    seconds = (stop - first) * stage.layer_s + (stage.head_s if is_last else 0.0)
    num_bytes = (stop - first) * model.layer_bytes
    num_bytes += (model.embedding_bytes if first == 0 else 0) + (model.head_bytes if is_last else 0)
    return Span(first, stop, seconds, num_bytes)


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
