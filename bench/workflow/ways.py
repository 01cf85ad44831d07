"""Ways to run a workflow: the scheduler as it is, with parts left out, and fixed maps of models to units.

All are the one scheduler with another policy. A fixed map knows no shapes: up to 8 chunks a launch, texts as a whole,
every stage after the whole of the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from paceline.workflow.placement import SchedulingPolicy

MODELS: Final = ("embed", "rerank", "agent", "chat")
OURS: Final = "ours"
GPU_ONLY: Final = "GPU only"
STATIC: Final = "static map"
BEST_STATIC: Final = "best static map"


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    policy: SchedulingPolicy


def alone(kind: str) -> SchedulingPolicy:
    """All models on one unit; search, splitting and the web where they must be."""
    return mapped(dict.fromkeys(MODELS, kind))


def mapped(units: Mapping[str, str]) -> SchedulingPolicy:
    return SchedulingPolicy(partition=False, criticality=False, static_map=units, look_ahead=False, control=False)


# By what the paper says of affinity (its figure 2) and of the Ayo-like baseline (all units, by model size): indexing
# and reranking on the NPU, the small model on the CPU, generation on the GPU; and with the chat model on the NPU, whose
# prefill is ten times as fast.
MAPS: Final = {
    "chat on the GPU": {"embed": "npu", "rerank": "npu", "agent": "cpu", "chat": "gpu"},
    "chat on the NPU": {"embed": "gpu", "rerank": "npu", "agent": "cpu", "chat": "npu"},
    "chat on the NPU, agent on the GPU": {"embed": "npu", "rerank": "npu", "agent": "gpu", "chat": "npu"},
}
_STATIC: Final = mapped(MAPS["chat on the GPU"])
_OURS: Final = SchedulingPolicy()
SINGLE: Final = (Way(GPU_ONLY, alone("gpu")), Way("NPU only", alone("npu")), Way("CPU only", alone("cpu")))
STATICS: Final = tuple(Way(f"{STATIC}, {name}", mapped(units)) for name, units in MAPS.items())


def added(best: SchedulingPolicy) -> tuple[Way, ...]:
    """The paper's table 3: one part on top of a static map."""
    return (
        Way("static + partition", replace(best, partition=True)),
        Way(
            "static + criticality",
            replace(best, criticality=True, static_map=None, look_ahead=True),
        ),
        Way("static + control", replace(best, control=True)),
    )


LESS: Final = (
    Way("without partition", replace(_OURS, partition=False)),
    Way("without criticality", replace(_OURS, criticality=False, look_ahead=False)),
    Way("without look-ahead", replace(_OURS, look_ahead=False)),
    Way("without control", replace(_OURS, control=False)),
    Way("without the expected part", replace(_OURS, future_weight=0.0)),
)
WHOLE: Final = Way(OURS, _OURS)
