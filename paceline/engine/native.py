"""Kernels in C where the installation has built them, and their work over several threads.

A kernel takes pieces of its work from a counter until none is left, without the interpreter's lock, so several threads
may call it at once with the same arguments. Knows nothing of what they compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


@cache
def load(name: str) -> ModuleType | None:
    """The module in C, or None where it was not built."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        return None


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="kernel")


def run(function: Callable[..., object], arguments: tuple[float, ...], num_threads: int) -> None:
    """`function(counter, *arguments)` on this thread and on others. counter: address of an int64 that is 0."""
    counter = ctypes.c_int64(0)
    address = ctypes.addressof(counter)
    others = [_helpers().submit(function, address, *arguments) for _ in range(num_threads - 1)]
    try:
        function(address, *arguments)
    finally:
        for other in others:
            if not other.cancel():  # it has begun: the counter and the arrays must outlive it
                other.result()
