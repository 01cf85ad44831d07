"""Groups of sequences: which sequences belong together, which hold rows, and which group is served before which.

The older group is served first. Two engines that write answers together must agree which one is older: else each could
prefer an answer that waits for the other engine. Such groups stand in the line of their link, where each has a place
that both sides know.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from paceline.core.batching.segment import SeqId

_MIN_IDLE_TICKS = 2  # so that a whole interval between two ticks has passed


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are admitted, preempted and released together, as the branches of one answer are."""

    key: int
    claim: int  # most rows of all of them together, in whole blocks; 0: not known
    priority: int = 0  # smaller ones run first; ones that come without end starve all larger ones
    line: tuple[Hashable, int] | None = None  # a link to another engine, and the place there of an answer they share
    owner: str = ""  # owners take turns where a step has no room for all; memory is given by age alone
    criticality: float = 0.0  # s of its workflow that wait for it; 0 without one. See `turns`


@dataclass(slots=True, eq=False)
class GroupState:
    """A group as long as one of its sequences is known."""

    group: Group
    rank: tuple[int, int, int]  # the smaller one is served first, and preempted by a larger one only if it is idle
    seqs: set[SeqId] = field(default_factory=set)
    resident: dict[SeqId, None] = field(default_factory=dict)  # sequences that hold rows, in order
    active_tick: int = 0  # the last tick by which a segment of it was pending


class GroupTable:
    """Groups by their sequences. Ticks stand for time: see `tick`."""

    def __init__(self) -> None:
        self._by_seq: dict[SeqId, GroupState] = {}
        self._by_key: dict[int, GroupState] = {}
        self._running: set[SeqId] = set()
        self._next_age = 0
        self._ticks = 0

    @property
    def running(self) -> Collection[SeqId]:
        """Sequences that hold rows."""
        return self._running

    def join(self, seq: SeqId, group: Group | None) -> GroupState:
        """The group of a sequence, which is given when the sequence is first named; None: one of its own."""
        state = self._by_seq.get(seq)
        if state is None:
            group = group or Group(-1 - seq, 0)
            state = self._by_key.get(group.key)
            if state is None:
                state = self._by_key[group.key] = GroupState(group, self._rank(group))
            self._by_seq[seq] = state
            state.seqs.add(seq)
        state.active_tick = self._ticks
        return state

    def _rank(self, group: Group) -> tuple[int, int, int]:
        """Priority, age, and place in its line. Those behind it that came before it count as no older from now on."""
        self._next_age += 1
        if group.line is None:
            return group.priority, self._next_age, 0
        link, place = group.line
        for state in self._by_key.values():
            if state.group.line is not None and state.group.line[0] == link and state.group.line[1] > place:
                state.rank = state.group.priority, self._next_age, state.group.line[1]
        return group.priority, self._next_age, place

    def leave(self, seq: SeqId) -> None:
        """The sequence has been released."""
        self.give_up_rows(seq)
        state = self._by_seq.pop(seq, None)
        if state is not None:
            state.seqs.discard(seq)
            if not state.seqs:
                del self._by_key[state.group.key]

    def of(self, seq: SeqId) -> GroupState:
        return self._by_seq[seq]

    def take_rows(self, seq: SeqId) -> None:
        self._running.add(seq)
        self._by_seq[seq].resident[seq] = None

    def give_up_rows(self, seq: SeqId) -> None:
        if seq in self._running:
            self._running.discard(seq)
            del self._by_seq[seq].resident[seq]

    def holders(self) -> Iterator[GroupState]:
        """Groups that hold rows."""
        return (state for state in self._by_key.values() if state.resident)

    def tick(self) -> None:
        """Time has passed, enough for an answer to be continued if nothing but this side holds it up."""
        self._ticks += 1

    def stay_active(self, state: GroupState) -> None:
        """Note that a segment of the group is pending."""
        state.active_tick = self._ticks

    def is_idle(self, state: GroupState) -> bool:
        """True if nothing of the group was pending for a whole interval between two ticks."""
        return self._ticks - state.active_tick >= _MIN_IDLE_TICKS

    def check(self) -> None:
        assert set(self._by_key.values()) == set(self._by_seq.values())
        assert {seq for state in self._by_key.values() for seq in state.resident} == self._running
        for key, state in self._by_key.items():
            assert key == state.group.key and state.seqs and set(state.resident) <= state.seqs, state
            assert all(self._by_seq[seq] is state for seq in state.seqs), state
