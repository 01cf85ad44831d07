"""Free memory of the C library's heap, given back to the system: glibc keeps what loading weights and long batches have
freed. Elsewhere nothing is done."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def trim_heap() -> None:
    """Takes some milliseconds, and holds no lock of Python's meanwhile."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """`malloc_trim(3)`; None where the C library has none."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes, found.restype = (ctypes.c_size_t,), ctypes.c_int
    return found
