"""Filters over file attributes, as in OpenAI's file search: comparisons, combined by `and` and `or`.

Pure. `ne` and `nin` are the negations of `eq` and `in`, so they also hold for a file without the attribute. Values of
different kinds are unequal and unordered; booleans are not numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Value = str | float | bool
Attributes = Mapping[str, Value]
AttributesOf = Callable[[str, str], Attributes]  # (store, file) → attributes of a file in a searched store


@dataclass(frozen=True, slots=True)
class Comparison:
    """One attribute compared with a constant."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: str
    value: Value | tuple[Value, ...]  # a tuple for `in` and `nin` only


@dataclass(frozen=True, slots=True)
class Compound:
    """Filters combined."""

    type: Literal["and", "or"]
    filters: tuple[Filter, ...]


Filter = Comparison | Compound


def matches(condition: Filter, attributes: Attributes) -> bool:
    """True if the attributes satisfy the filter."""
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
    """True for two numbers or two texts."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (ours, theirs))
    return numbers or (isinstance(ours, str) and isinstance(theirs, str))
