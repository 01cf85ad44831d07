"""Threads on which embedders and rerankers compute: those of their own, or the caller's where it is made for that.

A processing unit has a thread that is kept on its cores: what is computed for it is computed there, so that units on
two cores compute side by side. Other callers share the threads of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")


class _Marks(threading.local):
    """Of the present thread. threads: cores that it computes with; 0: it leaves computing to others."""

    threads = 0
    limited = False


_MARKS: Final = _Marks()


class ComputeThreads:
    """`workers` threads of one model, each of which uses `threads` cores."""

    def __init__(self, workers: int, name: str, threads: int) -> None:
        self._pool = ThreadPoolExecutor(workers, name, initializer=limit_threads, initargs=(threads,))

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` in this thread if it is for computing, in one of the model's otherwise, and wait."""
        if not _MARKS.threads:
            return self._pool.submit(work).result()
        if not _MARKS.limited:  # not before: it imports torch
            limit_threads(_MARKS.threads)
            _MARKS.limited = True
        return work()


def compute_here(threads: int) -> None:
    """Have models compute in the calling thread from now on, with so many cores."""
    _MARKS.threads = threads


def limit_threads(threads: int) -> None:
    """Limit torch's cores in this thread only.

    torch's setting applies to the calling thread and is also the default of later threads; a short-lived thread
    restores that default.
    """
    import torch

    default = torch.get_num_threads()
    torch.set_num_threads(threads)
    restorer = threading.Thread(target=torch.set_num_threads, args=(default,))
    restorer.start()
    restorer.join()
