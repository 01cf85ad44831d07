"""Ways to run a workflow: the scheduler as it is, with parts left out, and fixed maps of models to units."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from lab.scheduling import Ablation, static_map

MODELS: Final = ("embed", "rerank", "agent", "chat")
OURS: Final = "ours"
GPU_ONLY: Final = "GPU only"
STATIC: Final = "static map"
BEST_STATIC: Final = "best static map"


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    policy: Ablation


def alone(kind: str) -> Ablation:
    """All models on one unit; search, splitting and the web where they must be."""
    return static_map(dict.fromkeys(MODELS, kind))


# By what the paper says of affinity (its figure 2) and of the Ayo-like baseline (all units, by model size): indexing
# and reranking on the NPU, the small model on the CPU, generation on the GPU; and with the chat model on the NPU, whose
# prefill is ten times as fast.
MAPS: Final = {
    "chat on the GPU": {"embed": "npu", "rerank": "npu", "agent": "cpu", "chat": "gpu"},
    "chat on the NPU": {"embed": "gpu", "rerank": "npu", "agent": "cpu", "chat": "npu"},
    "chat on the NPU, agent on the GPU": {"embed": "npu", "rerank": "npu", "agent": "gpu", "chat": "npu"},
}
_STATIC: Final = static_map(MAPS["chat on the GPU"])
_OURS: Final = Ablation()
SINGLE: Final = (Way(GPU_ONLY, alone("gpu")), Way("NPU only", alone("npu")), Way("CPU only", alone("cpu")))
STATICS: Final = tuple(Way(f"{STATIC}, {name}", static_map(units)) for name, units in MAPS.items())


def added(best: Ablation) -> tuple[Way, ...]:
    """The paper's table 3: one part on top of a static map."""
    return (
        Way("static + partition", replace(best, partition=True)),
        Way(
            "static + criticality",
            replace(best, criticality=True, static_map=None, look_ahead=True),
        ),
    )


LESS: Final = (
    Way("without partition", replace(_OURS, partition=False)),
    Way("without criticality", replace(_OURS, criticality=False, look_ahead=False)),
    Way("without look-ahead", replace(_OURS, look_ahead=False)),
)
WHOLE: Final = Way(OURS, _OURS)
