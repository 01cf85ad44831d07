"""The partially observed graph of a workflow: sub-stages, what they need, and how far they are.

A sub-stage is a number of items (chunks, tokens) for one operation. It may be launched in parts. Agents add sub-stages
while others run; what a sub-stage needs may be another one as a whole, as much of it as there is, or only what it has
already written. Knows nothing of units and time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NewType

from paceline.core.side import Zone

SubStageId = NewType("SubStageId", int)
MORE: Final = 4  # items that an open-ended sub-stage is expected to have at least, until it ends


@dataclass(frozen=True, slots=True)
class Dependency:
    """What a sub-stage needs of another one: `all` of it; as large a share of it as is to be done itself (`flow`); or
    what it had `emitted` before the sub-stage was added, which is there already and tells only whose data it is."""

    on: SubStageId
    how: Literal["all", "flow", "emitted"] = "all"


@dataclass(frozen=True, slots=True)
class SubStage:
    """A part of a stage that units can work on."""

    id: SubStageId
    stage: str  # its name in the workflow's template
    model: str
    phase: str
    items: int  # at least 1; of an `open_ended` one: as expected
    needs: tuple[Dependency, ...] = ()
    feeds: tuple[SubStageId, ...] = ()  # sub-stages, not begun, that need all of this one from now on
    ordered: bool = False  # one launch at a time, as in decoding
    open_ended: bool = False  # ends when an event says so, as decoding does
    decides: bool = False  # sub-stages may be added because of what it writes
    group: int | None = None  # most items a launch: others wait for what is written in between
    private: bool = False  # reads private data itself; what needs it is private too
    item_bytes: float = 0.0  # moved for an item to a unit elsewhere, and back
    request: int = 0
    workflow: str = ""  # name of its template
    context: str = ""  # text in a model's memory that it continues; all of one context run where that lies
    here: bool = False  # runs in the device's zone whatever it reads, as its request wants; what needs it need not
    owner: str = ""  # whose request it is: owners take turns

    @property
    def operation(self) -> str:
        return f"{self.model}/{self.phase}"


@dataclass(slots=True)
class _State:
    items: int
    done: int = 0
    running: int = 0
    finished: bool = False
    begun: int = 0  # items from the first on that launches have taken
    returned: list[tuple[int, int]] = field(default_factory=list)  # of them, those to be done again: first, count


class StageGraph:
    """Sub-stages that were seen so far. whole_stages: a `flow` waits for all, too."""

    def __init__(self, *, whole_stages: bool = False) -> None:
        self._whole_stages = whole_stages
        self._nodes: dict[SubStageId, SubStage] = {}
        self._states: dict[SubStageId, _State] = {}
        self._needs: dict[SubStageId, list[Dependency]] = {}
        self._followers: dict[SubStageId, list[SubStageId]] = {}
        self._private: dict[SubStageId, bool] = {}
        self._contexts: dict[str, list[SubStageId]] = {}

    def __getitem__(self, node: SubStageId) -> SubStage:
        return self._nodes[node]

    def __contains__(self, node: SubStageId) -> bool:
        return node in self._nodes

    def add(self, nodes: Sequence[SubStage]) -> None:
        """Add sub-stages, each after those that it needs. Raises ValueError where one is wrong; none is added then."""
        known = set(self._nodes)
        for node in nodes:
            if node.id in known or node.items < 1 or (node.group is not None and node.group < 1):
                raise ValueError(f"sub-stage {node.id} is there already, or has no items")
            if missing := [need.on for need in node.needs if need.on not in known]:
                raise ValueError(f"sub-stage {node.id} needs {missing}, which are not there")
            begun = [at for at in node.feeds if at not in self._nodes or self._begun(at)]
            if begun or set(node.feeds) & self._before(need.on for need in node.needs):
                raise ValueError(f"sub-stage {node.id} cannot feed {node.feeds}: not there, begun, or before it")
            known.add(node.id)
        for node in nodes:
            self._nodes[node.id] = node
            self._states[node.id] = _State(node.items)
            self._needs[node.id] = list(node.needs)
            self._followers[node.id] = list(node.feeds)
            for need in node.needs:
                self._followers[need.on].append(node.id)
            if node.context:
                self._contexts.setdefault(node.context, []).append(node.id)
            for fed in node.feeds:
                self._needs[fed].append(Dependency(node.id))
        self._private.clear()

    def unfinished(self) -> Iterator[SubStage]:
        return (node for node in self._nodes.values() if not self._states[node.id].finished)

    def is_finished(self, node: SubStageId) -> bool:
        return self._states[node].finished

    def done(self, node: SubStageId) -> int:
        """Items that are done."""
        return self._states[node].done

    def followers(self, node: SubStageId) -> Sequence[SubStageId]:
        return self._followers[node]

    def needs(self, node: SubStageId) -> Sequence[Dependency]:
        return self._needs[node]

    def before(self, node: SubStageId) -> list[SubStage]:
        """Unfinished sub-stages that it needs, directly or not."""
        needed = self._before(need.on for need in self._needs[node])
        return [self._nodes[each] for each in needed if not self._states[each].finished]

    def remaining(self, node: SubStageId) -> int:
        """Items neither done nor being worked on, as far as is known; of an open-ended sub-stage at least some."""
        state = self._states[node]
        if state.finished:
            return 0
        left = state.items - state.done - state.running
        return max(left, MORE) if self._nodes[node].open_ended else left

    def available(self, node: SubStageId) -> int:
        """Items that a launch may take now."""
        state, left = self._states[node], self.remaining(node)
        if left <= 0 or (self._nodes[node].ordered and state.running):
            return 0
        for need in self._needs[node]:
            before = self._states[need.on]
            if before.finished or need.how == "emitted":
                continue
            if need.how == "all" or self._whole_stages:
                return 0
            left = min(left, state.items * before.done // before.items - state.done - state.running)
        return max(left, 0)

    def is_private(self, node: SubStageId) -> bool:
        """Whether its inputs come from private data, however indirectly."""
        if node not in self._private:
            upstream = any(self.is_private(need.on) for need in self._needs[node])
            self._private[node] = self._nodes[node].private or upstream
        return self._private[node]

    def stays_private(self, node: SubStageId) -> bool:
        """Whether it, or another sub-stage of its context, has private inputs or is to stay here."""
        together = self.of_context(node)
        return any(self._nodes[each].here or self.is_private(each) for each in together)

    def of_context(self, node: SubStageId) -> Sequence[SubStageId]:
        """Sub-stages of its context, itself included, in the order in which they came."""
        return self._contexts.get(self._nodes[node].context, [node])

    def begin(self, node: SubStageId, count: int) -> tuple[int, int]:
        """A launch of at most so many of the available items begins. Returns its first item and their number: fewer
        than asked for where a launch that came to nothing is repeated."""
        assert 0 < count <= self.available(node), (node, count)
        state = self._states[node]
        if state.returned:
            first, left = state.returned.pop()
            count = min(count, left)
            if count < left:
                state.returned.append((first + count, left - count))
        else:
            first = state.begun
            state.begun += count
        state.running += count
        return first, count

    def end(self, node: SubStageId, count: int, *, done: int | None = None, finished: bool = False) -> None:
        """A launch of so many items is done. done: of them, those that there were; None: all. finished: an open-ended
        sub-stage ends with it."""
        state = self._states[node]
        state.running -= count
        state.done += count if done is None else done
        whole = state.done >= state.items and not self._nodes[node].open_ended
        state.finished = state.finished or finished or whole

    def give_up(self, node: SubStageId, first: int, count: int) -> None:
        """A launch of these items has come to nothing: they are to be done again."""
        self._states[node].running -= count
        self._states[node].returned.append((first, count))

    def resize(self, node: SubStageId, items: int) -> None:
        """The true number of items is known, at least 1. Ignored for a sub-stage that has begun."""
        if not self._begun(node):
            self._states[node].items = max(items, 1)

    def drop(self, node: SubStageId) -> list[SubStageId]:
        """A sub-stage is wanted no more: it counts as finished. Returns those that have no other use, it included:
        what fed them alone."""
        if self._states[node].finished:
            return []
        self._states[node].finished = True
        dropped = [node]
        for need in self._needs[node]:
            if not any(not self._states[at].finished for at in self._followers[need.on]):
                dropped += self.drop(need.on)
        return dropped

    def forget(self, request: int) -> list[tuple[SubStage, int]]:
        """Remove the sub-stages of a request that has ended. Returns them with the items they have done."""
        gone = [(node, self._states[node.id].done) for node in self._nodes.values() if node.request == request]
        for node, _ in gone:
            for held in (self._nodes, self._states, self._needs, self._followers):
                held.pop(node.id)
            self._contexts.pop(node.context, None)
        self._private.clear()
        return gone

    def check(self) -> None:
        """Invariants, for tests."""
        for node, state in self._states.items():
            assert state.running >= 0 and state.done >= 0, node
            assert self._nodes[node].open_ended or state.done + state.running <= state.items, node

    def _begun(self, node: SubStageId) -> bool:
        state = self._states[node]
        return bool(state.done or state.running or state.finished)

    def _before(self, nodes: Iterable[SubStageId]) -> set[SubStageId]:
        """These and all that they need, directly or not."""
        found: set[SubStageId] = set()
        waiting = [node for node in nodes if node in self._nodes]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [need.on for need in self._needs[node]]
        return found


# Processing units, what a sub-stage can run on, and the models that they hold.


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


# Facts that the scheduler is told, each with the time, and what it wants done.


@dataclass(frozen=True, slots=True)
class Added:
    """Sub-stages appear: a workflow begins, or an agent has decided."""

    now: float  # s
    sub_stages: Sequence[SubStage]


@dataclass(frozen=True, slots=True)
class Resized:
    """The number of items of a sub-stage that has not begun is known now."""

    now: float
    sub_stage: SubStageId
    items: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A launch is done. finished: the open-ended sub-stage it belongs to ends with it."""

    now: float
    launch: int
    finished: bool = False
    items: int | None = None  # that were done: fewer where a text ends, more where it could not be cut; None: all


@dataclass(frozen=True, slots=True)
class Failed:
    """A launch has come to nothing, because of a fault or of a `Cancel`; its unit is free again."""

    now: float
    launch: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Sub-stages are wanted no more."""

    now: float
    sub_stages: Sequence[SubStageId]


@dataclass(frozen=True, slots=True)
class UnitLost:
    """A unit is gone, and its launch with it."""

    now: float
    unit: str
    also: Sequence[str] = ()  # units that are gone with it: nothing that ran on one begins anew on another of them


@dataclass(frozen=True, slots=True)
class UnitBack:
    now: float
    unit: str


@dataclass(frozen=True, slots=True)
class UnitMoved:
    """Moving data to a unit and back takes another time from now on."""

    now: float
    unit: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OtherBegan:
    """Work of no workflow begins on a unit, beside what is launched there: nobody schedules it, and it slows others."""

    now: float
    id: int  # given by whoever tells of it
    unit: str
    operation: str
    items: int


@dataclass(frozen=True, slots=True)
class OtherEnded:
    now: float
    id: int
    items: int | None = None  # that there were; None: all; 0: nothing can be learnt from it


WorkflowEvent = Added | Resized | Ended | Failed | Dropped | UnitLost | UnitBack | UnitMoved | OtherBegan | OtherEnded


@dataclass(frozen=True, slots=True)
class Launch:
    """Run items `first` to `first + count` of a sub-stage on a unit, in a launch of that shape."""

    id: int
    sub_stage: SubStageId
    unit: str
    shape: int
    first: int
    count: int
    forced: bool = False  # beyond the bandwidth limit, because nothing else ran
    criticality: float = 0.0  # s of the workflow from its sub-stage on, as predicted; 0: not known


@dataclass(frozen=True, slots=True)
class Cancel:
    """A launch is wanted no more; `Failed` or `Ended` shall follow."""

    launch: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """All sub-stages of a request that were added are finished. Once, unless more are added."""

    request: int


@dataclass(frozen=True, slots=True)
class Unrunnable:
    """No unit may run it: none that its inputs may go to holds the model. Its workflow cannot end."""

    sub_stage: SubStageId


WorkflowEffect = Launch | Cancel | RequestDone | Unrunnable
