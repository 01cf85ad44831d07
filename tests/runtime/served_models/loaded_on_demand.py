"""A model that is loaded on demand, whose loading a test can hold or let fail."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from paceline.engine.base import LoadedModel
from paceline.engine.fake import FakeEngine, fake_model
from paceline.errors import PacelineError
from paceline.runtime.node import Node
from paceline.runtime.resources import NodeParts, Offer
from paceline.runtime.served_models import ModelSlot


@dataclass
class OnDemand:
    name: str = "second"
    seed: int = 1
    weights: int = 0
    now: float = 0.0  # s, virtual
    failure: PacelineError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0  # loadings
    engines: WeakSet[FakeEngine] = field(default_factory=WeakSet)

    def __post_init__(self) -> None:
        self.gate.set()
        info = replace(fake_model(self.seed).engine.info, name=self.name)
        self.slot = ModelSlot(info, self._open, weights=self.weights, now=lambda: self.now)

    def num_engines(self) -> int:
        """Engines in memory."""
        gc.collect()
        return len(self.engines)

    async def _open(self, slot: ModelSlot) -> Node:
        self.begun += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        engine = FakeEngine(self.seed)
        self.engines.add(engine)
        return Node(
            "cloud", LoadedModel(engine, fake_model().tokenizer), None, NodeParts(offer=Offer(name=slot.info.name))
        )
