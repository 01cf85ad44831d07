"""Masks of constraints computed beside the event loop, in turns of their owners.

A mask over a real vocabulary takes 0.03 ms in most places and, under a schema that is made for it, 30 ms; llguidance
lets go of the GIL meanwhile. A session that needs one waits for it by itself (`run_apart`), and the loop serves the
others. An owner has `MOST_OF_ONE` of the threads at most, so that costly schemas hold up their own owner.

Not handled: taking a token into a path, during which llguidance 1.9 holds the GIL, 16 ms at the worst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Final, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet
from numpy.typing import NDArray

from paceline.core.fair import FairQueue
from paceline.core.sampling.sampler import Mask
from paceline.runtime.engine_loop.worker import BATCHING_WAIT_S, Worker


class _Apart(greenlet):
    """Marks the stacks that may be left."""


def run_apart(code: Callable[[], None]) -> None:
    """Run this on a stack of its own until it ends or first waits, as a machine does that asks for a mask in the middle
    of an event; the loop goes on, one thing at a time. It must not raise: what follows a wait has no caller."""
    apart = _Apart(code)
    apart.gr_context = copy_context()  # else none of the caller's variables are set
    apart.switch()


def can_wait() -> bool:
    """True within `run_apart`."""
    return isinstance(getcurrent(), _Apart)


def wait_for(begin: Callable[[Callable[[], None]], None]) -> None:
    """Leave the code here until the callback that `begin` is given is called, by the loop. `begin` must not call it."""
    apart = getcurrent()

    def go_on() -> None:
        apart.parent = getcurrent()  # where it comes back to: not where it was left, which may have ended
        apart.switch()

    begin(go_on)
    assert apart.parent is not None
    apart.parent.switch()


T = TypeVar("T")

THREADS: Final = 4
MOST_OF_ONE: Final = 2  # threads of an owner at once


class MaskThreads:
    """Belongs to one event loop."""

    def __init__(self, worker: Worker) -> None:
        """worker: its steps wait briefly for sessions that masks have held up."""
        self.worker = worker
        self._threads = ThreadPoolExecutor(THREADS, "masks")
        self._queue = FairQueue(THREADS, most=MOST_OF_ONE)

    def submit(self, owner: str, work: Callable[[], object], done: Callable[[], None]) -> None:
        """Do this on a thread, in its owner's turn, then call `done` on the loop. work: must not raise."""
        self._queue.enter(owner, partial(self._begin, owner, work, done))

    def stop(self) -> None:
        """End the threads once they are done. What waits for its turn is never called back."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, owner: str, work: Callable[[], object], done: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def ended(future: Future[object]) -> None:
            if not future.cancelled():
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._ended, owner, done)

        self._threads.submit(work).add_done_callback(ended)

    def _ended(self, owner: str, done: Callable[[], None]) -> None:
        self._queue.give_back(owner)
        done()


class MaskBesideLoop:
    """`core.sampling.sampler.Mask` of one answer, computed on threads where its session can wait for that."""

    def __init__(self, mask: Mask, threads: MaskThreads, owner: str) -> None:
        self._mask = mask
        self._threads = threads
        self._owner = owner
        self._slow = False  # steps do not wait for one that took long the last time

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        return self.at_once(lambda: self._mask.allowed(path))

    def complete(self, path: Sequence[int]) -> bool:
        return self.at_once(lambda: self._mask.complete(path))

    def at_once(self, work: Callable[[], T]) -> T:
        """See `Mask`. The session waits once, however many masks the work asks for: on a thread they are computed."""
        if not can_wait():
            return work()
        found: list[T] = []
        faults: list[Exception] = []

        def attempt() -> None:
            try:
                found.append(work())
            except Exception as fault:  # the session's, which goes on with it
                faults.append(fault)
            self._slow = time.perf_counter() - begun > BATCHING_WAIT_S  # other masks of the owner's included

        begun = time.perf_counter()

        def begin(go_on: Callable[[], None]) -> None:
            worker, expected = self._threads.worker, not self._slow
            if expected:
                worker.expect()

            def done() -> None:
                go_on()
                if expected:
                    worker.continued()

            self._threads.submit(self._owner, attempt, done)

        wait_for(begin)
        if faults:
            raise faults[0]
        return found[0]
