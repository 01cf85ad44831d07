"""Garbage collection while answers are written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_heap() -> Iterator[None]:
    """Freeze the heap after start-up so that garbage collection skips long-lived objects (modules, models, stores).

    A full collection takes a few hundred milliseconds and delays every answer; with a frozen heap, a few. One use per
    process at a time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
