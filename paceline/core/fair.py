"""Fairness among owners that come and go, one rule at every door: nobody waits for more than one turn of each other.

Of those that wait, who has had least is next (`Turns`). So owners that want all they can get have the same over time,
whatever each of their requests costs and however many they are; one that wants less is not kept waiting; and one that
comes, or returns, begins where those that wait are: it is owed nothing for the time before. What cannot be taken back
is given in `Shares`, which leave something for who comes next; who finds none may wait in a `FairQueue`. After Goyal,
Vin and Cheng, Start-Time Fair Queueing (1996), and Choudhury and Hahne, Dynamic Queue Length Thresholds for
Shared-Memory Packet Switches (1998).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """What owners have had, in any unit. For each choice: `begin`, `order`, then `served` for what was chosen."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}  # owners that wait, and those that were ahead of them when they last did
        self._last: dict[str, int] = {}  # of the same owners: the last choice in which each was served
        self.number = 0  # of choices

    def begin(self, owners: Collection[str]) -> None:
        """These owners wait, all of them. Where nobody does, nobody is ahead any more."""
        self.number += 1
        known = (self._had[owner] for owner in owners if owner in self._had)
        behind = min(known, default=0.0 if owners else math.inf)
        # Who does not wait and was not ahead is forgotten; the counts begin at 0 again, so that they stay small.
        kept = {owner: had - behind for owner, had in self._had.items() if owner in owners or had > behind}
        self._had = {**dict.fromkeys(owners, 0.0), **kept}
        self._last = {owner: self._last.get(owner, 0) for owner in self._had}

    def order(self, waiting: Sequence[tuple[str, T]], cost: Callable[[T], float] = lambda _: 1.0) -> list[T]:
        """What waits, given with its owners and each owner's in order, in the order of turns if all of it were served.

        Of owners that have had the same, who was served longest ago is next, then who is named first.
        """
        if len({owner for owner, _ in waiting}) < 2:
            return [each for _, each in waiting]
        queues: dict[str, deque[T]] = {}
        for owner, each in waiting:
            queues.setdefault(owner, deque()).append(each)
        turns = [
            (self._had.get(owner, 0.0), self._last.get(owner, 0), place, owner) for place, owner in enumerate(queues)
        ]
        heapq.heapify(turns)
        ordered: list[T] = []
        while turns:
            had, last, place, owner = turns[0]
            ordered.append(each := queues[owner].popleft())
            if queues[owner]:
                heapq.heapreplace(turns, (had + cost(each), last, place, owner))
            else:
                heapq.heappop(turns)
        return ordered

    def served(self, owner: str, cost: float = 1.0) -> None:
        """The owner has had so much more."""
        self._had[owner] += cost
        self._last[owner] = self.number


EASE = 8


class Shares:
    """Amounts of something of which owners hold some; `take` and `give_back` come in pairs.

    An owner may take while it then holds at most `EASE` times what was free. So one that is alone holds eight ninths of
    all, and the rest is free for whoever comes next; several that want all they can get hold the same each, and one
    that wants less has what it wants (max-min fairness). Nobody is thrown out: what an owner holds beyond its share
    goes to others as it is given back. The owner "" is everybody where nobody else can ever come: it may have all.
    """

    def __init__(self, places: float, *, most: float = math.inf) -> None:
        """most: of one owner, whose only one may be of any size; infinite: whatever is free."""
        self.places = places
        self.taken = 0
        self.most = most
        self._held: dict[str, int] = {}  # owners without any are left out

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def has_room(self, owner: str, amount: int = 1) -> bool:
        """True if there is so much for this owner now."""
        free, held = self.places - self.taken, self.held(owner)
        return free >= amount and (not held or held + amount <= self.most) and (held < EASE * free or not owner)

    def take(self, owner: str, amount: int = 1) -> bool:
        """Take so much; False if it is not there, see `has_room`."""
        if not self.has_room(owner, amount):
            return False
        self.force(owner, amount)
        return True

    def force(self, owner: str, amount: int = 1) -> None:
        """Count what the owner holds in any case, also beyond its share and all places."""
        self._held[owner] = self.held(owner) + amount
        self.taken += amount

    def give_back(self, owner: str, amount: int = 1) -> None:
        left = self._held.pop(owner) - amount
        assert left >= 0, owner
        if left:
            self._held[owner] = left
        self.taken -= amount

    def check(self) -> None:
        assert sum(self._held.values()) == self.taken and all(held > 0 for held in self._held.values()), self._held


class FairQueue:
    """Places and who waits for one: one that comes free is for the owner whose turn it is, of those with room in their
    share. Whoever has waited long enough leaves."""

    def __init__(self, places: float, *, most: float = math.inf, waiting: float = math.inf) -> None:
        """most: places of one owner. waiting: who wait at once."""
        self.shares = Shares(places, most=most)
        self._most_waiting = waiting
        self._calls: dict[Callable[[], None], str] = {}  # of those who wait, in order: whose they are
        self._turns = Turns()

    def enter(self, owner: str, call: Callable[[], None]) -> bool:
        """Call this once with a place taken, now or in the owner's turn. False: too many wait."""
        if self.shares.take(owner):
            call()
        elif len(self._calls) < self._most_waiting:
            self._calls[call] = owner
        else:
            return False
        return True

    def leave(self, call: Callable[[], None]) -> None:
        """Wait no longer, called or not."""
        self._calls.pop(call, None)

    def give_back(self, owner: str) -> None:
        """Give a place back, and call whose turn it is."""
        self.shares.give_back(owner)
        able = {each for each in {*self._calls.values()} if self.shares.has_room(each)}
        self._turns.begin(able)
        if able:
            call = self._turns.order([(each, call) for call, each in self._calls.items() if each in able])[0]
            called = self._calls.pop(call)
            self._turns.served(called)
            self.shares.force(called)
            call()


def fair_share(held: Iterable[int], room: int) -> int:
    """Max-min fair share: the highest cap per owner with which all owners together fit into `room`. Unlike a place of
    `Shares`, what an owner has stored can be taken back."""
    sizes = sorted(held)
    for others, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        if size * others > room:
            return max(room, 0) // others
        room -= size
    return sizes[-1] if sizes else 0
