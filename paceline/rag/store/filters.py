"""Filters over the attributes of files: comparisons, and `and` and `or` of them, as OpenAI's file search has them.

Pure. `ne` and `nin` hold exactly where `eq` and `in` do not, so also for a file without the attribute. A value of
another kind is unequal and in no order to any; booleans are no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Value = str | float | bool
Attributes = Mapping[str, Value]
AttributesOf = Callable[[str, str], Attributes]  # of a file in one of the stores that are searched: (store, file)


@dataclass(frozen=True, slots=True)
class Comparison:
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str
    value: Value | tuple[Value, ...]  # a tuple for `in` and `nin` only


@dataclass(frozen=True, slots=True)
class Compound:
    type: Literal["and", "or"]
    filters: tuple[Filter, ...]


Filter = Comparison | Compound


def matches(condition: Filter, attributes: Attributes) -> bool:
    if isinstance(condition, Compound):
        combine = all if condition.type == "and" else any
        return combine(matches(part, attributes) for part in condition.filters)
    ours, theirs = attributes.get(condition.key), condition.value
    match condition.type:
        case "eq" | "ne":
            return _equal(ours, theirs) == (condition.type == "eq")
        case "in" | "nin":
            values = theirs if isinstance(theirs, tuple) else (theirs,)
            return any(_equal(ours, value) for value in values) == (condition.type == "in")
        case "gt":
            return _ordered(ours, theirs) and ours > theirs  # type: ignore[operator]  # of one kind
        case "gte":
            return _ordered(ours, theirs) and ours >= theirs  # type: ignore[operator]
        case "lt":
            return _ordered(ours, theirs) and ours < theirs  # type: ignore[operator]
        case "lte":
            return _ordered(ours, theirs) and ours <= theirs  # type: ignore[operator]


def _equal(ours: object, theirs: object) -> bool:
    return isinstance(ours, bool) == isinstance(theirs, bool) and ours == theirs


def _ordered(ours: object, theirs: object) -> bool:
    """Two numbers or two texts."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (ours, theirs))
    return numbers or (isinstance(ours, str) and isinstance(theirs, str))
