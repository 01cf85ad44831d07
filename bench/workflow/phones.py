"""The paper's two phones and its two families of models, as profiles: modelled, not measured.

Peak speed of GPU and NPU and the memory's bandwidth are the paper's table 2. All else is assumed, and equal for all
ways: a launch takes its overhead and the longer of computing and reading weights; efficiency grows with the tokens of
a launch and falls where activations no longer fit on the chip; an NPU runs compiled shapes only. Two assumptions of
what share of their peaks units reach are measured side by side (`TABLE`, `PUBLISHED`). The scheduler gets profiles
that were fitted to noisy samples of these, and knows nothing of contention for memory.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lab.scheduling import GivenProfiles, PaddedProfile
from lab.simulation.workflows import Slowdown, Truth
from paceline.workflow.graph import ProcessingUnit
from paceline.workflow.profiles import Key, OperationProfile, Profiles

BATCHES: Final = (1, 2, 4, 8, 16, 32)  # chunks
PREFILLS: Final = (16, 32, 64, 128, 256, 512)  # tokens
DECODES: Final = (1, 4, 8, 16, 32)
CHUNK_TOKENS: Final = 128
SCORED_TOKENS: Final = 160  # of a chunk with a question
WEB_UNITS: Final = 4  # pages at once
FETCH_S: Final = 0.6
KNOTS: Final = (0.6, 0.8, 1.0, 1.2, 1.5, 1.8, 2.2)  # of the peak bandwidth
NOISE: Final = 0.02  # of a sample that the scheduler's profiles are fitted to


@dataclass(frozen=True, slots=True)
class Phone:
    name: str
    peaks: Mapping[str, float]  # operations a second; of the CPU what it reaches
    bandwidth: float  # GB/s


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks of table 2 that a unit reaches: operations at its best shape, and memory bandwidth."""

    name: str
    compute: Mapping[str, float]
    memory: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Network:
    """A model in INT8."""

    parameters: float
    hidden: int
    layers: int


Family = Mapping[str, Network]

PHONES: Final = {
    "Redmi K80": Phone("Redmi K80", {"cpu": 0.4e12, "gpu": 2.8e12, "npu": 34e12}, 76.8),
    "OnePlus 13": Phone("OnePlus 13", {"cpu": 0.53e12, "gpu": 3.4e12, "npu": 50e12}, 84.8),
}
FAMILIES: Final[Mapping[str, Family]] = {
    "Qwen3": {
        "embed": Network(0.6e9, 1024, 28),
        "rerank": Network(0.6e9, 1024, 28),
        "agent": Network(1.7e9, 2048, 28),
        "chat": Network(4e9, 2560, 36),
    },
    "BGE and Llama 3": {
        "embed": Network(0.335e9, 1024, 24),
        "rerank": Network(0.56e9, 1024, 24),
        "agent": Network(1.24e9, 2048, 16),
        "chat": Network(8e9, 4096, 32),
    },
}
TABLE: Final = Efficiency(  # GPU and NPU reach the same share, so that an NPU computes 12 and 15 times as fast
    "table 2", {"cpu": 1.0, "gpu": 0.25, "npu": 0.25}, {"cpu": 0.45, "gpu": 0.55, "npu": 0.5}
)
# Llama-3.2-1B with 8-bit weights on the 8 Elite: 58.4 tokens/s prefill and 38.8 decoding on the GPU (llama.cpp's
# OpenCL, its pull request 15732), 1,983 and 16 on the NPU (QHexRT's model card): 0.043 and 0.098 of the peaks, 48 and
# 20 GB/s.
PUBLISHED: Final = Efficiency(
    "published", {"cpu": 1.0, "gpu": 0.043, "npu": 0.098}, {"cpu": 0.45, "gpu": 0.57, "npu": 0.23}
)
EFFICIENCIES: Final = (TABLE, PUBLISHED)
OVERHEADS: Final = {"cpu": 0.001, "gpu": 0.003, "npu": 0.006}  # s, a launch or a decoded token
RAMPS: Final = {"cpu": 8.0, "gpu": 32.0, "npu": 64.0}  # tokens at which half of the efficiency is reached
SPILLS: Final = {"cpu": 0.95, "gpu": 0.9, "npu": 0.8}  # efficiency left for each doubling beyond SPILL_TOKENS
SPILL_TOKENS: Final = 1024


def units() -> list[ProcessingUnit]:
    """CPU, GPU and NPU with all models, and requests to the web."""
    models = frozenset(("embed", "rerank", "agent", "chat"))
    soc = [
        ProcessingUnit(kind, kind, models | ({"host"} if kind == "cpu" else set())) for kind in ("npu", "gpu", "cpu")
    ]
    web = [
        ProcessingUnit(f"web{number}", "web", frozenset(("web",)), zone="cloud", memory=f"web{number}")
        for number in range(WEB_UNITS)
    ]
    return soc + web


def true_profiles(phone: Phone, family: Family, efficiency: Efficiency, contention: float) -> dict[Key, Truth]:
    """contention: kappa of an operation that only reads memory; the paper has the form, not the value."""
    found = {
        ("host/split", "cpu"): Truth(OperationProfile({n: 0.0002 * n for n in BATCHES}), {1: 2.0}),
        ("host/search", "cpu"): Truth(OperationProfile({1: 0.002}), {1: 5.0}),
        ("web/fetch", "web"): Truth(OperationProfile({1: FETCH_S})),
    }
    for kind in ("cpu", "gpu", "npu"):
        for model, phase, shapes, tokens in (
            ("embed", "encode", BATCHES, CHUNK_TOKENS),
            ("rerank", "score", BATCHES, SCORED_TOKENS),
            ("agent", "prefill", PREFILLS, 1),
            ("chat", "prefill", PREFILLS, 1),
        ):
            points = [_launch(phone, efficiency, family[model], kind, shape * tokens) for shape in shapes]
            found[f"{model}/{phase}", kind] = _truth(phone, shapes, points, contention, padded=kind == "npu")
        for model in ("agent", "chat"):
            seconds, read_s, moved = _launch(phone, efficiency, family[model], kind, 1)
            steps = [(n * seconds, n * read_s, n * moved) for n in DECODES]
            found[f"{model}/decode", kind] = _truth(phone, DECODES, steps, contention, padded=False)
    return found


def fitted_profiles(true: Mapping[Key, Truth], seed: int) -> Profiles:
    """Profiles as measured on a phone: means of five noisy samples of each shape."""
    rng = random.Random(seed)

    def noisy(value: float) -> float:
        return sum(value * rng.gauss(1.0, NOISE) for _ in range(5)) / 5

    return GivenProfiles(
        {
            key: type(each.profile)({shape: noisy(each.profile.seconds(shape)) for shape in each.profile.shapes})
            for key, each in true.items()
        }
    )


def _launch(
    phone: Phone, efficiency: Efficiency, network: Network, kind: str, tokens: int
) -> tuple[float, float, float]:
    """(seconds, of them reading memory alone would take, bytes moved) of a forward of so many tokens."""
    reached = tokens / (tokens + RAMPS[kind])
    doublings = max(0.0, (tokens / SPILL_TOKENS) - 1.0)
    reached *= SPILLS[kind] ** min(doublings, 4.0)
    peak = phone.peaks[kind] * efficiency.compute[kind]
    compute = 2.0 * network.parameters * tokens / (peak * reached)
    moved = network.parameters + 20.0 * network.hidden * network.layers * tokens
    read = moved / (1e9 * phone.bandwidth * efficiency.memory[kind])
    if tokens == 1:
        compute = 2.0 * network.parameters / peak  # a matrix times a vector has kernels of its own
    return OVERHEADS[kind] + max(compute, read), read, moved


def _truth(
    phone: Phone,
    shapes: tuple[int, ...],
    launches: list[tuple[float, float, float]],
    contention: float,
    *,
    padded: bool,
) -> Truth:
    taken = dict(zip(shapes, launches, strict=True))
    seconds, read, _ = launches[-1]
    kappa = contention * (0.2 + 0.8 * min(1.0, read / seconds))
    knots = tuple(phone.bandwidth * knot for knot in KNOTS)
    factors = tuple(1.0 + kappa * (knot - KNOTS[0]) ** 2 for knot in KNOTS)
    profile = (PaddedProfile if padded else OperationProfile)({shape: each[0] for shape, each in taken.items()})
    return Truth(profile, {shape: each[2] / each[0] / 1e9 for shape, each in taken.items()}, Slowdown(knots, factors))
