"""Fair shares of a fixed number of places among owners that come and go.

An owner may take a place while it holds fewer than `EASE` times as many as are free. So one that is alone holds eight
ninths of all, and the rest is free for whoever comes next; several that want all they can get hold the same number
each, and one that wants less has what it wants (max-min fairness). Nobody is thrown out: what an owner holds beyond its
share goes to others as it is given back. The rule needs no list of those who wait, and no clock. After Choudhury and
Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet Switches (1998).
"""

from __future__ import annotations

from collections.abc import Callable

EASE = 8


class Shares:
    """Places of which each owner holds some; `take` and `give_back` come in pairs."""

    def __init__(self, places: int, *, most: int | None = None) -> None:
        """most: of one owner, whatever is free."""
        self.places = places
        self.taken = 0
        self._most = places if most is None else most
        self._held: dict[str, int] = {}  # owners without any are left out

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def has_room(self, owner: str, *, alone: bool = False) -> bool:
        """True if there is a place for this owner now. alone: nobody else can ever come, so that all places are its."""
        free, held = self.places - self.taken, self.held(owner)
        return free > 0 and held < self._most and (held < EASE * free or alone)

    def take(self, owner: str, *, alone: bool = False) -> bool:
        """Take one place; False if there is none, see `has_room`."""
        if not self.has_room(owner, alone=alone):
            return False
        self.force(owner)
        return True

    def force(self, owner: str) -> None:
        """Count a place that the owner holds in any case, also beyond its share and all places."""
        self._held[owner] = self.held(owner) + 1
        self.taken += 1

    def give_back(self, owner: str) -> None:
        held = self._held.pop(owner) - 1
        assert held >= 0, owner
        if held:
            self._held[owner] = held
        self.taken -= 1

    def check(self) -> None:
        assert sum(self._held.values()) == self.taken and all(held > 0 for held in self._held.values()), self._held


class WaitingLine:
    """Queue for places, first come, first served. Knows no clock: whoever has waited long enough leaves.

    A place is not kept for who is called: somebody else may take it first, and the one called waits again.
    """

    def __init__(self, shares: Shares, most: int) -> None:
        """most: who wait at once."""
        self._shares = shares
        self._most = most
        self._calls: dict[Callable[[], None], tuple[str, bool]] = {}  # of those who wait, in order: owner, alone

    def enter(self, owner: str, call: Callable[[], None], *, alone: bool = False) -> bool:
        """Wait, until `call` is called once; False if too many do. alone: as for `Shares.has_room`."""
        if len(self._calls) >= self._most:
            return False
        self._calls[call] = owner, alone
        return True

    def leave(self, call: Callable[[], None]) -> None:
        """Wait no longer, called or not."""
        self._calls.pop(call, None)

    def give_back(self, owner: str) -> None:
        """Give a place back, and call the first one that it leaves room for."""
        self._shares.give_back(owner)
        for call, (waiting, alone) in self._calls.items():
            if self._shares.has_room(waiting, alone=alone):
                del self._calls[call]
                call()
                return


class Allowances:
    """Amounts of something that owners hold, so much of each at most; an owner's only one may be of any size."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._held: dict[str, int] = {}  # owners without any are left out

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def take(self, owner: str, amount: int) -> bool:
        """Hold a positive amount more; False if that is too much beside what the owner holds already."""
        assert amount > 0
        if owner in self._held and self._held[owner] + amount > self.most:
            return False
        self._held[owner] = self.held(owner) + amount
        return True

    def give_back(self, owner: str, amount: int) -> None:
        left = self._held.pop(owner) - amount
        assert left >= 0, owner
        if left:
            self._held[owner] = left
