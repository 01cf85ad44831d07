"""JSON schemas whose objects end: where properties are named, no others may be written unless the schema allows them.

JSON Schema allows any further key where `additionalProperties` is absent, which is how most programs write schemas, and
a small model that is allowed one goes on with keys to the limit. llama.cpp's grammars close such objects too. Whatever
fits the closed schema fits the one given. Pure.

Objects that are put together (`allOf`, alternatives or a reference beside `properties`) are closed as a whole, to the
names that any of their parts has: a part that was closed alone would forbid the names of the others. Not closed:
objects without named properties, those of which a part is open by its own words, and what stands below `not`, `if` and
`contains`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote

Schema = dict[str, object]
# "closed": stands alone. "open": a part of an object that is closed as a whole; what lies deeper stands alone again.
_Mode = Literal["closed", "open"]

_LISTS = ("allOf", "anyOf", "oneOf")  # parts of the object they stand in
_BRANCHES = ("then", "else")  # likewise; no mask keeps them, but the names they ask for must be possible
_DEEPER = ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_DEEPER_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "required", "additionalProperties", "unevaluatedProperties", "minProperties"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "$dynamicRef", *_BRANCHES}
)
_MAX_VISITS = 20_000  # of schemas; one that refers to and fro more often is left as it is


class _NamesUnknownError(Exception):
    """Which names an object may have cannot be told."""


def closed(schema: Schema) -> Schema:
    """The schema with its objects closed; the same object where there is nothing to close, or no way to tell what."""
    closing = _Closing(schema)
    try:
        result = closing.result()
    except (_NamesUnknownError, RecursionError):  # or of more parts within parts than can be followed
        return schema
    return schema if result == schema else result


class _Closing:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._copies: dict[tuple[str, _Mode], str] = {}  # pointers whose target is wanted in a mode -> name in `$defs`
        self._waiting: list[tuple[str, object, _Mode]] = []  # copies to make: name, target, mode
        self._visits = 0

    def result(self) -> Schema:
        root = self._schema(self._root, "closed")
        made: dict[str, object] = {}
        while self._waiting:
            name, target, mode = self._waiting.pop()
            made[name] = self._any(target, mode)
        if made:
            given = root.get("$defs")
            root = {**root, "$defs": {**(given if isinstance(given, dict) else {}), **made}}
        return root

    # ---- rewriting --------------------------------------------------------------------------------------------------
    def _any(self, value: object, mode: _Mode = "closed") -> object:
        if isinstance(value, list):
            return [self._any(each, mode) for each in value]
        return self._schema(value, mode) if isinstance(value, dict) else value

    def _schema(self, schema: Schema, mode: _Mode) -> Schema:
        self._count()
        if "$id" in schema and schema is not self._root:
            raise _NamesUnknownError  # references in it count from there
        whole = mode == "closed" and not _is_one_part(schema) and _has_parts(schema)
        inner: _Mode = "open" if whole else mode
        result = {key: self._value(key, value, inner) for key, value in schema.items()}
        if mode == "closed" and (whole or "properties" in schema):
            self._close(schema, result)
        return result

    def _value(self, key: str, value: object, mode: _Mode) -> object:
        if key in _LISTS:
            return self._any(value, mode)
        if key == "$ref" and isinstance(value, str):
            return self._reference(value, mode)
        if key in _DEEPER or key == "prefixItems":
            return self._any(value)
        if key in _DEEPER_NAMED and isinstance(value, dict):
            return {name: self._any(each) for name, each in value.items()}
        return value

    def _close(self, schema: Schema, result: Schema) -> None:
        if "additionalProperties" in schema or "unevaluatedProperties" in schema:
            return  # it says itself which others there may be
        try:
            names = self._names(schema, set())
        except KeyError:  # a reference that leads nowhere: the compiler says so
            return
        if names is None or not (names or "properties" in schema):
            return
        least = schema.get("minProperties")
        if isinstance(least, int) and least > len(names):
            return
        own = result.get("properties")
        if own is not None and not isinstance(own, dict):
            return
        result["properties"] = {**(own or {}), **{name: True for name in names if name not in (own or {})}}
        result["additionalProperties"] = False

    def _reference(self, pointer: str, mode: _Mode) -> str:
        """Where the target lies in this mode."""
        parts = pointer.split("/")
        if mode == "closed" and (pointer == "#" or (len(parts) == 3 and parts[1] in ("$defs", "definitions"))):
            return pointer  # what is defined is closed where it stands
        if (pointer, mode) not in self._copies:
            try:
                target = self._target(pointer)
            except KeyError:
                return pointer
            name = f"{mode}-{len(self._copies)}"
            while name in _mapping(self._root.get("$defs")):
                name += "'"
            self._copies[pointer, mode] = name
            self._waiting.append((name, target, mode))
        return f"#/$defs/{self._copies[pointer, mode]}"

    # ---- reading ----------------------------------------------------------------------------------------------------
    def _names(self, schema: object, seen: set[str]) -> dict[str, None] | None:
        """The properties that an object or any of its parts names, in order; None: others are allowed by its words."""
        self._count()
        if not isinstance(schema, dict):
            return {}
        for key in ("additionalProperties", "unevaluatedProperties"):
            if schema.get(key, False) is not False:
                return None
        if "$dynamicRef" in schema or (seen and "patternProperties" in schema):
            return None
        parts = [each for key in _LISTS for each in _list(schema.get(key))]
        parts += [schema[key] for key in _BRANCHES if key in schema]
        asked = [each for each in _list(schema.get("required")) if isinstance(each, str)]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, each in _mapping(schema.get(key)).items():
                asked.append(name)
                asked += [one for one in _list(each) if isinstance(one, str)]
                parts.append(each)
        names = dict.fromkeys([*_mapping(schema.get("properties")), *asked])
        seen = seen | {""}  # from here on parts
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen |= {reference}
            parts.append(self._target(reference))
        for part in parts:
            more = self._names(part, seen)
            if more is None:
                return None
            names |= more
        return names

    def _target(self, pointer: str) -> object:
        """Raises KeyError for what is not in this schema."""
        if pointer != "#" and not pointer.startswith("#/"):
            raise KeyError(pointer)
        found: object = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict):
                found = found[key]
            else:
                raise KeyError(pointer)
        return found

    def _count(self) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise _NamesUnknownError


def _has_parts(schema: Schema) -> bool:
    return any(key in schema for key in (*_LISTS, *_BRANCHES, "$ref", "dependentSchemas", "dependencies"))


def _is_one_part(schema: Schema) -> bool:
    """Is it but another place for one schema, or for one of several? These then stand alone."""
    parts = [key for key in (*_LISTS, "$ref") if key in schema]
    return (
        len(parts) == 1 and not _OF_OBJECTS & schema.keys() and (parts != ["allOf"] or len(_list(schema["allOf"])) == 1)
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
