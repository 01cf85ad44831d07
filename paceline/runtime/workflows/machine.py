"""The machine, in words that are equal where profiles of its units may be believed."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

import psutil

CPU_INFO: Final = Path("/proc/cpuinfo")


def describe_machine(gpu: str | None = None) -> str:
    """Processor, cores that this process may use, GiB of memory, and the GPU."""
    cores = len(os.sched_getaffinity(0))
    gib = round(psutil.virtual_memory().total / 2**30)
    return ", ".join(
        [f"{processor()}, {cores} core{'s' if cores > 1 else ''}, {gib} GiB", *([] if gpu is None else [gpu])]
    )


def processor() -> str:
    try:
        lines = CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name"]
    return names[0] if names else platform.processor() or platform.machine()
