"""Processing units, what a sub-stage can run on, and the models that they hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.core.side import Zone


@dataclass(frozen=True, slots=True)
class WorkflowModels:
    """Names of models, as in units and profiles. `host` is what runs without a model: splitting and search."""

    embed: str = "embed"
    rerank: str = "rerank"
    agent: str = "agent"  # rewrites, plans, refines
    chat: str = "chat"
    host: str = "host"
    web: str = "web"
    far: str = "far"  # the other side's documents


@dataclass(frozen=True, slots=True)
class ProcessingUnit:
    """A processor, or a peer, that runs one launch at a time.

    Units with the same `memory` share its bandwidth. Seconds to load a model are not modelled: a unit has its models.
    """

    name: str  # units that one stage may use as one have the same first word
    kind: str  # cpu, gpu, npu, ...: units of a kind share profiles
    models: frozenset[str]
    zone: Zone = "device"
    memory: str = "device"
    latency_s: float = 0.0  # s, to a launch and back; 0 where memory is shared
    bytes_per_s: float = math.inf

    def transfer_s(self, size: float) -> float:
        """Seconds that moving inputs of so many bytes there, and the result back, takes."""
        return self.latency_s + size / self.bytes_per_s

    def may_run(self, model: str, *, private: bool) -> bool:
        """Whether it holds the model and, of private inputs, is in the device's zone."""
        return model in self.models and (self.zone == "device" or not private)


class UnitPool:
    """All units, in a fixed order; the first ones are the default. Units can be lost and come back."""

    def __init__(self, units: Sequence[ProcessingUnit]) -> None:
        self._units = {unit.name: unit for unit in units}
        if len(self._units) < len(units):
            raise ValueError("two processing units have one name")
        self._lost: set[str] = set()

    def __iter__(self) -> Iterator[ProcessingUnit]:
        return (unit for name, unit in self._units.items() if name not in self._lost)

    def __getitem__(self, name: str) -> ProcessingUnit:
        return self._units[name]

    def lose(self, name: str) -> None:
        self._lost.add(self._units[name].name)

    def restore(self, name: str) -> None:
        self._lost.discard(name)

    def move(self, name: str, latency_s: float, bytes_per_s: float) -> None:
        """What moving data there takes has changed."""
        self._units[name] = replace(self._units[name], latency_s=latency_s, bytes_per_s=bytes_per_s)

    def able(self, model: str, *, private: bool, lost: bool = False) -> list[ProcessingUnit]:
        """Units that may run the model on such inputs. lost: those too that are lost now."""
        return [unit for unit in (self._units.values() if lost else self) if unit.may_run(model, private=private)]
