"""Pages of a list that may grow between requests: cursors are ids, the order is that of creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import RequestError
from paceline.rag.database import Database


@dataclass(frozen=True, slots=True)
class Paging:
    """A page request: the `limit` items that follow `after`, or the last `limit` before `before`, in this order."""

    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None  # an item's id
    before: str | None = None


def page(
    database: Database, source: str, parameters: list[object], paging: Paging, *, key: str = "id"
) -> tuple[list[tuple[Any, ...]], bool]:
    """Read a page inside the caller's transaction: rows without their first column, and whether there are more.

    source: a SELECT whose first columns are `seq` and the one named `key`. Raises RequestError for a cursor that is
    not in the list.
    """
    conditions, values = ["1"], list(parameters)
    for cursor, name, later in ((paging.after, "after", True), (paging.before, "before", False)):
        if cursor is None:
            continue
        row = database.execute(f"SELECT seq FROM ({source}) WHERE {key} = ?", *parameters, cursor).fetchone()
        if row is None:
            raise RequestError(f"{name} names {cursor[:64]!r}, which is not in this list.", param=name)
        conditions.append(f"seq {'>' if later == (paging.order == 'asc') else '<'} ?")
        values.append(row[0])
    backwards = paging.before is not None and paging.after is None  # the last rows before the cursor
    direction = "ASC" if (paging.order == "asc") != backwards else "DESC"
    rows = database.execute(
        f"SELECT * FROM ({source}) WHERE {' AND '.join(conditions)} ORDER BY seq {direction} LIMIT ?",
        *values,
        paging.limit + 1,
    ).fetchall()
    found = [tuple(row[1:]) for row in rows[: paging.limit]]
    return found[::-1] if backwards else found, len(rows) > paging.limit
