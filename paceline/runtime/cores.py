"""Cores of this machine that a thread may be kept on, where the system supports that."""

from __future__ import annotations

import os
from collections.abc import Set


def allowed_cores() -> frozenset[int]:
    """Cores that this process may use; none where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def pin(cores: Set[int]) -> None:
    """Keep the calling thread, and the threads that it will start, on these cores. Empty: wherever there is time."""
    if cores:
        os.sched_setaffinity(0, cores)
