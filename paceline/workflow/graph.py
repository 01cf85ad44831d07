"""The graph of workflows as far as it is known: stages, what they need, how far they are, and what they run on.

A stage is a number of items (chunks, tokens) for one operation. It may be launched in parts. Agents add stages while
others run; what a stage needs may be another one as a whole, or only what it has already written. Knows nothing of
time.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.core.side import Zone

MORE: Final = 4  # items that an open-ended stage is expected to have at least, until it ends


@dataclass(frozen=True, slots=True)
class Operation:
    """A phase of a model: what launches do, and what is known of units."""

    model: str
    phase: str
    ordered: bool = False  # one launch at a time, as in decoding
    open_ended: bool = False  # ends when an outcome says so, as decoding does
    group: int | None = None  # most items a launch: others wait for what is written in between
    item_bytes: float = 4.0  # moved for an item to a unit elsewhere, and back

    @property
    def name(self) -> str:
        return f"{self.model}/{self.phase}"


@dataclass(eq=False, slots=True)
class Request:
    """One workflow. owner: whose it is; owners take turns. barred: kinds of units that nothing of it runs on."""

    owner: str = ""
    barred: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Need:
    """What a stage needs of another one: `all` of it, or what it had `emitted` before the stage was added, which is
    there already and tells only whose data it is."""

    on: Stage
    how: Literal["all", "emitted"] = "all"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a launch has led to."""

    items: int | None = None  # that were done: fewer than the launch's where a text ends, more of a prompt; None: all
    finished: bool = False  # its stage ends with it
    added: Sequence[Stage] = ()  # an agent has decided
    dropped: Sequence[Stage] = ()  # these are wanted no more


Work = Callable[["Launch"], Awaitable[Outcome]]


async def nothing(launch: Launch) -> Outcome:  # noqa: ARG001
    """The work of a stage that has none."""
    return Outcome()


@dataclass(slots=True)
class StageProgress:
    """How far a stage is, in items. Kept by its graph."""

    number: int = 0  # of the stage, in the order in which they were added
    done: int = 0
    running: int = 0
    finished: bool = False
    begun: int = 0  # from the first on, that launches have taken
    returned: list[tuple[int, int]] = field(default_factory=list)  # of them, those to be done again: first, count
    followers: list[Stage] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Stage:
    """A part of a workflow: what it needs, how much it is, what it does.

    run: does a launch's part. Raises whatever goes wrong: the launch is tried again, then given up with the workflow.
    """

    name: str  # as its client is told
    operation: Operation
    items: int  # at least 1; as expected until it begins, of an open-ended one always
    needs: list[Need] = field(default_factory=list)
    feeds: Sequence[Stage] = ()  # stages, not begun, that need all of this one from now on
    request: Request = field(default_factory=Request)
    text: object = None  # in a model's memory, that it continues; all stages of one text run where that lies
    private: bool = False  # reads private data itself; what needs it is private too
    here: bool = False  # runs in the device's zone whatever it reads, as its request wants; what needs it need not
    run: Work = nothing
    progress: StageProgress = field(init=False, default_factory=StageProgress)

    def __repr__(self) -> str:
        return f"<{self.name} {self.operation.name}>"

    @property
    def has_begun(self) -> bool:
        return bool(self.progress.done or self.progress.running or self.progress.finished)

    @property
    def remaining(self) -> int:
        """Items neither done nor being worked on, as far as is known; of an open-ended stage at least some."""
        if self.progress.finished:
            return 0
        left = self.items - self.progress.done - self.progress.running
        return max(left, MORE) if self.operation.open_ended else left

    def resize(self, items: int) -> None:
        """The true number of items is known, at least 1. Ignored for a stage that has begun."""
        if not self.has_begun:
            self.items = max(items, 1)


class StageGraph:
    """Stages that were seen so far."""

    def __init__(self) -> None:
        self._stages: dict[Stage, None] = {}
        self._added = 0
        self._private: dict[Stage, bool] = {}
        self._texts: dict[object, list[Stage]] = {}

    def __contains__(self, stage: Stage) -> bool:
        return stage in self._stages

    def add(self, stages: Sequence[Stage]) -> None:
        """Add stages, each after those that it needs. Raises ValueError where one is wrong; none is added then."""
        known = set(self._stages)
        for stage in stages:
            if stage in known or stage.items < 1:
                raise ValueError(f"{stage} is there already, or has no items")
            if missing := [need.on for need in stage.needs if need.on not in known]:
                raise ValueError(f"{stage} needs {missing}, which are not there")
            wrong = [each for each in stage.feeds if each not in known or each.has_begun]
            if wrong or set(stage.feeds) & _before(need.on for need in stage.needs):
                raise ValueError(f"{stage} cannot feed {stage.feeds}: not there, begun, or before it")
            known.add(stage)
        for stage in stages:
            self._stages[stage] = None
            self._added += 1
            stage.progress.number = self._added
            for need in stage.needs:
                need.on.progress.followers.append(stage)
            for fed in stage.feeds:
                fed.needs.append(Need(stage))
                stage.progress.followers.append(fed)
            if stage.text is not None:
                self._texts.setdefault(stage.text, []).append(stage)
        self._private.clear()

    def unfinished(self) -> Iterator[Stage]:
        return (stage for stage in self._stages if not stage.progress.finished)

    def of(self, request: Request) -> list[Stage]:
        return [stage for stage in self._stages if stage.request is request]

    def available(self, stage: Stage) -> int:
        """Items that a launch may take now: all that remain, or 0."""
        waits = any(need.how == "all" and not need.on.progress.finished for need in stage.needs)
        return 0 if waits or (stage.operation.ordered and stage.progress.running) else max(stage.remaining, 0)

    def is_private(self, stage: Stage) -> bool:
        """Whether its inputs come from private data, however indirectly."""
        if stage not in self._private:
            self._private[stage] = stage.private or any(self.is_private(need.on) for need in stage.needs)
        return self._private[stage]

    def stays_here(self, stage: Stage) -> bool:
        """Whether it, or another stage of its text, has private inputs or is to stay in the device's zone."""
        return any(each.here or self.is_private(each) for each in self.of_text(stage))

    def of_text(self, stage: Stage) -> Sequence[Stage]:
        """Stages of its text, itself included, in the order in which they came."""
        return self._texts.get(stage.text, [stage]) if stage.text is not None else [stage]

    def begin(self, stage: Stage, count: int) -> tuple[int, int]:
        """A launch of at most so many of the available items begins. Returns its first item and their number: fewer
        than asked for where a launch that came to nothing is repeated."""
        assert 0 < count <= self.available(stage), (stage, count)
        state = stage.progress
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

    def end(self, stage: Stage, count: int, *, done: int | None = None, finished: bool = False) -> None:
        """A launch of so many items is done. done: of them, those that there were; None: all. finished: an open-ended
        stage ends with it."""
        state = stage.progress
        state.running -= count
        state.done += count if done is None else done
        whole = state.done >= stage.items and not stage.operation.open_ended
        state.finished = state.finished or finished or whole

    def give_up(self, stage: Stage, first: int, count: int) -> None:
        """A launch of these items has come to nothing: they are to be done again."""
        stage.progress.running -= count
        stage.progress.returned.append((first, count))

    def drop(self, stage: Stage) -> list[Stage]:
        """A stage is wanted no more: it counts as finished. Returns those that have no other use, it included: what
        fed them alone."""
        if stage.progress.finished:
            return []
        stage.progress.finished = True
        dropped = [stage]
        for need in stage.needs:
            if all(after.progress.finished for after in need.on.progress.followers):
                dropped += self.drop(need.on)
        return dropped

    def forget(self, request: Request) -> list[Stage]:
        """Remove the stages of a request that has ended. Returns them."""
        gone = self.of(request)
        for stage in gone:
            del self._stages[stage]
            self._texts.pop(stage.text, None)
        self._private.clear()
        return gone


def waits_for(stage: Stage) -> list[Stage]:
    """Unfinished stages that it needs, directly or not."""
    return [each for each in _before(need.on for need in stage.needs) if not each.progress.finished]


def _before(stages: Iterable[Stage]) -> set[Stage]:
    """These and all that they need, directly or not."""
    found: set[Stage] = set()
    waiting = list(stages)
    while waiting:
        stage = waiting.pop()
        if stage not in found:
            found.add(stage)
            waiting += [need.on for need in stage.needs]
    return found


# Processing units, what a stage can run on.


@dataclass(frozen=True, slots=True)
class ProcessingUnit:
    """A processor, or a peer, that runs one launch at a time. Units of one `memory` may go on with each other's texts.

    Seconds to load a model are not modelled: a unit has its models.
    """

    name: str
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


# Facts that the scheduler is told, each with the time, and what it wants done.


@dataclass(frozen=True, slots=True)
class StagesAdded:
    """Stages appear: a workflow begins."""

    now: float  # s
    stages: Sequence[Stage]


@dataclass(frozen=True, slots=True)
class Ended:
    """A launch is done."""

    now: float
    launch: int
    outcome: Outcome = Outcome()


@dataclass(frozen=True, slots=True)
class Failed:
    """A launch has come to nothing, because of a fault or of a `Cancel`; its unit is free again."""

    now: float
    launch: int


@dataclass(frozen=True, slots=True)
class Left:
    """Nobody waits for a request any more: its stages are wanted no more."""

    now: float
    request: Request


@dataclass(frozen=True, slots=True)
class UnitsLost:
    """Units are gone, all at once, and their launches with them."""

    now: float
    units: Sequence[str]


@dataclass(frozen=True, slots=True)
class UnitsBack:
    """Units may be used, and moving data to each and back takes so long from now on."""

    now: float
    units: Sequence[str]
    latency_s: float = 0.0
    bytes_per_s: float = math.inf


WorkflowEvent = StagesAdded | Ended | Failed | Left | UnitsLost | UnitsBack


@dataclass(frozen=True, slots=True)
class Launch:
    """Run items `first` to `first + count` of a stage on a unit, in a launch of that shape."""

    id: int
    stage: Stage
    unit: str
    shape: int
    first: int
    count: int
    criticality: float = 0.0  # s of the workflow from its stage on, as predicted; 0: not known


@dataclass(frozen=True, slots=True)
class Cancel:
    """A launch is wanted no more; `Failed` or `Ended` shall follow."""

    launch: int


@dataclass(frozen=True, slots=True)
class StagesDone:
    """All stages of a request that were added are finished. Once, unless more are added."""

    request: Request


@dataclass(frozen=True, slots=True)
class Unrunnable:
    """No unit may run it: none that its inputs may go to holds the model. Its workflow cannot end."""

    stage: Stage


WorkflowEffect = Launch | Cancel | StagesDone | Unrunnable
