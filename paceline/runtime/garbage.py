"""What the garbage collector need not look at while answers are written."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_heap() -> Iterator[None]:
    """What is there now (modules, models, stores) stays until the end: it is not looked through for garbage meanwhile.

    That would take a few hundred milliseconds each time, and hold every answer up. What answers leave behind is still
    looked for, and that takes a few. For one program at a time: the heap is the process's.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
