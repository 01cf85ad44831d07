"""Launches to be measured: prompts and tokens on the engine's lanes; embedding, reranking and search on a host thread.

A decoded token has `CONTEXT` rows before it where the model has room for them. Sampling and texts are not part of the
launches: what they add is learnt while workflows run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from paceline.core.batching.segment import Segment, SeqId
from paceline.rag.rerank import Reranker
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.engine_loop.requests import SequenceOp
from paceline.runtime.engine_loop.worker import EngineWorker
from paceline.runtime.units.registry import ENGINE, UnitRegistry
from paceline.runtime.workflows.demand import CONTEXT
from paceline.runtime.workflows.places import CANDIDATES

PROMPTS: Final = (32, 128, 512)  # tokens
TEXTS: Final = (1, 4, 16)  # tokens
EMBEDDED: Final = (1, 4, 16)  # texts
RERANKED: Final = (1, 2, 4, 8)  # passages
QUESTION: Final = "When does the library open, and who keeps the key of the reading room?"
PASSAGE: Final = " ".join(["The reading room opens at nine, and its key hangs behind the broom in the hall."] * 8)
TOKEN: Final = 1

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Operation:
    """One that is measured. names: under which it is stored. launch: runs so many items and returns its seconds."""

    names: tuple[str, ...]
    kind: str  # of unit
    shapes: Sequence[int]  # rising
    launch: Callable[[int], Awaitable[float]]


@dataclass(slots=True)
class EngineLanes:
    """Launches of an engine whose worker runs; each has a sequence of its own. `close` releases them."""

    worker: EngineWorker
    clock: Clock
    max_positions: int
    _free: list[SeqId] = field(default_factory=list)  # with their context

    @property
    def context(self) -> int:
        """Rows before decoded tokens."""
        return max(1, min(CONTEXT, self.max_positions // 2))

    def fitting(self, shapes: Sequence[int]) -> tuple[int, ...]:
        """Shapes that the model has room for, behind the context."""
        return tuple(n for n in shapes if n <= self.max_positions - self.context) or (1,)

    async def prefill(self, tokens: int) -> float:
        seq = self.worker.allocate()
        try:
            began = self.clock()
            await self.worker.compute(Segment(seq, 0, (TOKEN,) * tokens))
            return self.clock() - began
        finally:
            self.worker.control(SequenceOp.release(seq))

    async def decode(self, tokens: int) -> float:
        fresh = not self._free
        seq = self.worker.allocate() if fresh else self._free.pop()
        try:
            if fresh:
                await self.worker.compute(Segment(seq, 0, (TOKEN,) * self.context))
            began = self.clock()
            for row in range(tokens):
                await self.worker.compute(Segment(seq, self.context + row, (TOKEN,)))
            seconds = self.clock() - began
        except BaseException:
            self.worker.control(SequenceOp.release(seq))
            raise
        self.worker.control(SequenceOp.truncate(seq, self.context))
        self._free.append(seq)
        return seconds

    def close(self) -> None:
        for seq in self._free:
            self.worker.control(SequenceOp.release(seq))
        self._free.clear()


def engine_operations(lanes: EngineLanes, registry: UnitRegistry) -> list[Operation]:
    """Agents and answers are written by one model on the same lanes, so they share their profiles."""
    models = dict.fromkeys((registry.models.agent, registry.models.chat))
    return [
        Operation(tuple(f"{model}/prefill" for model in models), ENGINE, lanes.fitting(PROMPTS), lanes.prefill),
        Operation(tuple(f"{model}/decode" for model in models), ENGINE, lanes.fitting(TEXTS), lanes.decode),
    ]


def host_operations(
    registry: UnitRegistry, store: DocumentStore, reranker: Reranker | None, clock: Clock
) -> list[Operation]:
    """On the first host unit of each kind that does it. A search only where there is something to find, reranking where
    it is done."""
    models, embedder = registry.models, store.embedder

    def on_each_kind(
        model: str, phase: str, shapes: Sequence[int], work: Callable[[int], object]
    ) -> Iterator[Operation]:
        units = {unit.kind: unit.name for unit in reversed(registry.units) if model in unit.models}
        for kind, unit in units.items():
            yield Operation((f"{model}/{phase}",), kind, shapes, partial(timed, unit, work))

    async def timed(unit: str, work: Callable[[int], object], items: int) -> float:
        began = clock()
        await registry.run(unit, lambda: work(items))
        return clock() - began

    def embed(texts: int) -> object:
        return embedder.embed([QUESTION] if texts == 1 else [PASSAGE] * texts)

    found = list(on_each_kind(models.embed, "encode", EMBEDDED, embed))
    if store.count():
        vector = embedder.embed([QUESTION])[0]

        def search(_: int) -> object:
            return store.search(QUESTION, CANDIDATES, vector=vector)

        found += on_each_kind(models.host, "search", (1,), search)
    if reranker is not None:

        def rerank(passages: int) -> object:
            return reranker.score(QUESTION, [PASSAGE] * passages)

        found += on_each_kind(models.rerank, "score", RERANKED, rerank)
    return found
