"""Options, claims and reports of benches, with the conditions of the machine.

Knows nothing of what is measured. A claim is a ratio with a target; only this module decides if it holds.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from .models import RealModels

_LIBRARIES = ("paceline", "torch", "transformers", "numpy")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of every bench."""

    quick: bool = False  # the same code with fewer repetitions
    data: Path | None = None  # folder with the evaluation sets
    models: RealModels | None = None  # of a bench that has MODELS; None: the demonstration's


@dataclass(frozen=True, slots=True)
class Claim:
    """A measured ratio and its target."""

    name: str
    value: float
    target: float | None  # None: reported, without an aim
    better: Literal["higher", "lower"]
    paper: str | None = None  # the paper's figure, if it reports one
    interval: tuple[float, float] | None = None  # of 90 %; None: counted, or of a run that is always the same

    @property
    def holds(self) -> bool:
        """The worse end of the interval reaches the target, not the value alone."""
        if self.target is None:
            return True
        low, high = self.interval or (self.value, self.value)
        return low >= self.target if self.better == "higher" else high <= self.target


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a bench. `conditions` are the bench's own; `to_json` adds those of the machine."""

    bench: str
    conditions: Mapping[str, object]
    rows: Sequence[Mapping[str, object]]
    claims: Sequence[Claim] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "commit": commit(),
            "conditions": machine() | dict(self.conditions),
            "rows": [dict(row) for row in self.rows],
            "claims": [asdict(claim) | {"holds": claim.holds} for claim in self.claims],
        }

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def commit() -> str:
    """Commit of the checkout, with `+` if files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return "unknown"
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def machine() -> dict[str, object]:
    """Date, hardware and library versions. Threads and GPU only if torch is installed."""
    cpu, flags = _cpu()
    conditions: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu,
        "instructions": [name for name in _INSTRUCTIONS if name in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": round(psutil.getloadavg()[0], 2),  # other load on the machine makes every number worse
        "python": platform.python_version(),
    }
    for library in _LIBRARIES:
        try:
            conditions[library] = version(library)
        except PackageNotFoundError:
            continue
    if "torch" in conditions:
        import torch

        conditions["threads"] = torch.get_num_threads()
        conditions["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return conditions


def _cpu() -> tuple[str, frozenset[str]]:
    """(name, instruction sets)"""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("Features") or "").split())
