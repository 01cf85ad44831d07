"""JSON schemas as data: detect what takes too long to compile, and relax what cannot be enforced. Pure.

Only keywords count, not equal names under `properties` or in data such as a default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

MAX_REMAINDERS = 50_000  # a second of compiling
MAX_OPTIONAL = 400  # properties of one object that may be left out: masks take 10 ms, and with 500 llguidance gives up
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
_NAMED = frozenset(  # from names to schemas
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


class TooLarge(ValueError):
    """A schema that could not be kept to in good time."""


def has_too_many_remainders(schema: object) -> bool:
    """True if `multipleOf` needs too many states: one for each remainder, of the lcm of all divisors."""
    lcm = 1
    for divisor in _divisors(schema):
        lcm = math.lcm(lcm, divisor)
        if lcm > MAX_REMAINDERS:
            return True
    return False


def check_optional(schema: object) -> None:
    """Raises TooLarge for an object with more properties that may be left out than MAX_OPTIONAL."""
    for each in _schemas(schema):
        properties, required = each.get("properties"), each.get("required")
        if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL:
            needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            number = len(properties.keys() - needed)
            if number > MAX_OPTIONAL:
                raise TooLarge(f"an object of it has {number} properties that may be left out; {MAX_OPTIONAL} may be")


def has_one_of(schema: object) -> bool:
    """True if `oneOf` occurs anywhere in the schema."""
    return any("oneOf" in each for each in _schemas(schema))


def loosened(schema: dict[str, object]) -> dict[str, object]:
    """The schema without patterns and bounds of numbers; every value that fits the given schema fits this one."""
    kept = {key: _loosened(key, inner) for key, inner in schema.items() if not _is_limit(key, inner)}
    if "patternProperties" in schema:
        kept.pop("additionalProperties", None)  # else the names that a pattern allowed would be forbidden
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
    """True for a well-formed pattern or bound. Malformed ones stay, for the compiler to refuse."""
    match key:
        case "pattern":
            return isinstance(inner, str)
        case "patternProperties":
            return isinstance(inner, dict)
        case _:
            return key in _BOUNDS and isinstance(inner, int | float) and not isinstance(inner, bool)


def _divisors(schema: object) -> Iterator[int]:
    """Values of `multipleOf`, without sign and decimal point."""
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
    """All subschemas, the schema itself included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            yield item
            for key, inner in item.items():
                if key in _NAMED and isinstance(inner, dict):
                    pending += inner.values()
                elif key not in _DATA:
                    pending.append(inner)
