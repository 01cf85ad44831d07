"""The partially observed graph of a workflow: sub-stages, what they need, and how far they are.

A sub-stage is a number of items (chunks, tokens) for one operation. It may be launched in parts. Agents add sub-stages
while others run; what a sub-stage needs may be another one as a whole, as much of it as there is, or only what it has
already written. Knows nothing of units and time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NewType

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
