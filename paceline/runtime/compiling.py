"""Constraints of requests compiled beside the event loop, in turns of their owners.

Compiling takes up to `MAX_COMPILE_S` of a processor, and llguidance lets go of the GIL meanwhile. It has threads of its
own, so that it holds up neither answers nor searches, and an owner has one of them at most, so that one who sends
costly schemas waits for himself. Not handled: as many such owners as there are threads; others then wait for a turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from paceline.core.sampling.sampler import Constraint, Mask
from paceline.engine.base import TextModel
from paceline.engine.grammar.compiler import GrammarCompiler

THREADS: Final = 4


class CompilingThreads:
    """The compiler of one vocabulary, on threads. All methods belong to one event loop."""

    def __init__(self, tokenizer: TextModel) -> None:
        self._grammars = GrammarCompiler(tokenizer)
        self._threads = ThreadPoolExecutor(THREADS, "compiling")
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of the owners who compile or wait
        self._waiting: defaultdict[str, int] = defaultdict(int)  # requests of each of them

    async def start(self) -> None:
        """Load the vocabulary now, because that holds the GIL for about a second."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._grammars.warm)

    async def mask(self, constraint: Constraint, owner: str) -> Mask:
        """A new mask for one answer, at once if the owner has had it compiled.

        Raises RequestError for an unsupported constraint.
        """
        known = self._grammars.known(constraint, owner)
        if known is not None:
            return known
        self._waiting[owner] += 1
        try:
            async with self._turns[owner]:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._grammars.mask, constraint, owner)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner], self._turns[owner]

    async def stop(self) -> None:
        """End the threads; constraints that wait are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
