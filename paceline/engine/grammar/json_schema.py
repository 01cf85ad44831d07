"""JSON schemas as data: what in one takes too long to follow, and what may be left out of one. Pure.

A keyword counts where it is one: not among the names under `properties`, nor in a value that is data, as a default is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

MAX_REMAINDERS = 50_000  # a second of compiling
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
_NAMED = frozenset(  # from names to schemas
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def has_too_many_remainders(schema: object) -> bool:
    """A number's remainder is followed by as many states as it can have, for all `multipleOf` together."""
    together = 1
    for divisor in _divisors(schema):
        together = math.lcm(together, divisor)
        if together > MAX_REMAINDERS:
            return True
    return False


def has_one_of(schema: object) -> bool:
    """Are there alternatives of which exactly one may fit?"""
    return any("oneOf" in each for each in _schemas(schema))


def loosened(schema: dict[str, object]) -> dict[str, object]:
    """Without patterns and bounds of numbers: what fits the schema fits this, and more does."""
    kept = {key: _loosened(key, inner) for key, inner in schema.items() if not _is_limit(key, inner)}
    if "patternProperties" in schema:
        kept.pop("additionalProperties", None)  # else nothing would be left of the names that a pattern allowed
    return kept


def _loosened(key: str, inner: object) -> object:
    if key in _DATA:
        return inner
    if key in _NAMED and isinstance(inner, dict):
        return {name: _each(schema) for name, schema in inner.items()}
    return _each(inner)


def _each(inner: object) -> object:
    if isinstance(inner, list):
        return [_each(one) for one in inner]
    return loosened(inner) if isinstance(inner, dict) else inner


def _is_limit(key: str, inner: object) -> bool:
    """Only what is well formed: what means nothing is for the compiler to refuse."""
    match key:
        case "pattern":
            return isinstance(inner, str)
        case "patternProperties":
            return isinstance(inner, dict)
        case _:
            return key in _BOUNDS and isinstance(inner, int | float) and not isinstance(inner, bool)


def _divisors(schema: object) -> Iterator[int]:
    """What stands behind multipleOf, without sign and decimal point."""
    for each in _schemas(schema):
        divisor = each.get("multipleOf")
        if isinstance(divisor, bool):
            continue
        if isinstance(divisor, int) and divisor:
            yield abs(divisor)
        elif isinstance(divisor, float) and math.isfinite(divisor) and divisor:
            digits, exponent = Decimal(str(divisor)).as_tuple()[1:]
            yield int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)


def _schemas(value: object) -> Iterator[dict[str, object]]:
    """All that are in it, itself included."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            yield found
            for key, inner in found.items():
                if key in _NAMED and isinstance(inner, dict):
                    waiting += inner.values()
                elif key not in _DATA:
                    waiting.append(inner)
