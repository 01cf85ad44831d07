"""Which models are unloaded, and when: those that were idle for long, and the longest idle ones where memory is short.

A model that is being used is never among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from paceline.errors import EngineError
from paceline.runtime.served_models.slot import ModelSlot

OVERHEAD: Final = 1.25  # of what a model takes, to the size of its weights
SHORT: Final = 1 / 16  # of all memory: with less left, idle models go


class ModelMemory:
    """The models that are loaded on demand. Belongs to the loop of the server."""

    def __init__(self, *, idle_s: float, free: Callable[[], int], total: int) -> None:
        """idle_s: after which a model is unloaded. free, total: bytes of the memory that models are loaded into."""
        self.slots: list[ModelSlot] = []
        self._idle_s = idle_s
        self._free = free
        self._total = total
        self._loading = asyncio.Lock()

    async def unload_idle(self) -> None:
        """Unload what is due now."""
        for slot in self.slots:
            if slot.idle_s is not None and slot.idle_s >= self._idle_s:
                await slot.unload()
        while self._free() < SHORT * self._total and (longest := self._longest_idle()) is not None:
            await longest.unload()

    @asynccontextmanager
    async def room_for(self, slot: ModelSlot) -> AsyncIterator[None]:
        """Memory to load this model, one at a time; others that are idle are unloaded for it. Raises EngineError where
        that is not enough."""
        async with self._loading:
            needed = int(OVERHEAD * slot.weights)
            while self._free() < needed and (longest := self._longest_idle()) is not None:
                await longest.unload()
            if (free := self._free()) < needed:
                loaded = ", ".join(each.info.name for each in self.slots if each.state == "loaded")
                beside = f" beside {loaded}, in use now: try again later" if loaded else ""
                raise EngineError(
                    f"it needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free{beside}."
                )
            yield

    def _longest_idle(self) -> ModelSlot | None:
        idle = [(slot.idle_s, number) for number, slot in enumerate(self.slots) if slot.idle_s is not None]
        return self.slots[max(idle)[1]] if idle else None
