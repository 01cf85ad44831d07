"""Look-up tables of what documents say: in memory only, and erased when a document is removed.

The rows of an answer that a document may have taken part in are never written to disk. `Lifetime` is what an answer's
rows may outlive. Not thread-safe.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

from paceline.core.drafting.lookup_table import LookupTable

OWNERS: Final = 32  # tables in memory

Lifetime = Literal["owner", "documents", "answer"]
"""What the rows of an answer are kept with.

`owner`: written without any document, they may go to disk. `documents`: this side's documents took part, or may have
written earlier turns of the conversation; the rows go as soon as one is removed here. `answer`: the other side takes
part, and does not say when it removes a document; the rows end with the answer.
"""


def over(table: LookupTable) -> LookupTable:
    """An empty table that reads `table` where it has no row, and never changes it."""
    return LookupTable(table.vocab_size, base=table, capacity=table.capacity)


class DocumentTables:
    """One table for each owner, over the owner's table on disk, for as long as no document is removed."""

    def __init__(self, owners: int = OWNERS) -> None:
        """owners: limit of tables; the least recently used is forgotten."""
        self._owners = owners
        self._removals = 0  # of documents, when these tables were made
        self._tables: OrderedDict[str, tuple[LookupTable, LookupTable]] = OrderedDict()  # the owner's, and that over it

    def table(self, owner: str, below: LookupTable, removals: int) -> LookupTable:
        """The table of an answer whose prompts were searched after so many removals. below: the owner's table; another
        one than before was erased or loaded again, and what was over it is erased too.

        A table of fewer removals than these tables have seen is a fresh one that nobody keeps.
        """
        self.erase_older(removals)
        if removals < self._removals:
            return over(below)
        known = self._tables.get(owner)
        if known is None or known[0] is not below:
            self._erase(owner)
            known = self._tables[owner] = below, over(below)
        self._tables.move_to_end(owner)
        while len(self._tables) > self._owners:
            del self._tables[next(iter(self._tables))]
        return known[1]

    def erase_older(self, removals: int) -> None:
        """Erase every table if a document has been removed since they were made. An answer under way goes on with an
        empty one, which ends with it."""
        if removals > self._removals:
            for owner in list(self._tables):
                self._erase(owner)
            self._removals = removals

    def _erase(self, owner: str) -> None:
        if (known := self._tables.pop(owner, None)) is not None:
            known[1].erase()
