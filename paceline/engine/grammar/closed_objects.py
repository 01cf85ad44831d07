"""Close the objects of a JSON schema: an object with named properties gets no others unless the schema allows them.

JSON Schema allows any further key where `additionalProperties` is absent, as in most programs' schemas, and a small
model then writes keys up to the token limit. llama.cpp's grammars close such objects too. Every value that fits the
closed schema fits the given one. Pure.

Composed objects (`allOf`, alternatives or a reference beside `properties`) are closed as a whole, to the names of all
their parts: a part closed alone would forbid the names of the others. Not closed: objects without named properties,
objects with a part that explicitly allows other names, and schemas below `not`, `if` and `contains`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote

Schema = dict[str, object]
# "closed": an object of its own. "open": a part of an object that is closed as a whole; deeper objects are their own.
_Mode = Literal["closed", "open"]

_LISTS = ("allOf", "anyOf", "oneOf")  # parts of the same object
_BRANCHES = ("then", "else")  # likewise; no mask enforces them, but the names they require must be possible
_DEEPER = ("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_DEEPER_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "required", "additionalProperties", "unevaluatedProperties", "minProperties"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "$dynamicRef", *_BRANCHES}
)
_MAX_VISITS = 20_000  # of subschemas; a schema whose references need more is left unchanged


class _NamesUnknownError(Exception):
    """The names that an object may have cannot be determined."""


def closed(schema: Schema) -> Schema:
    """The schema with its objects closed; the same object if nothing is to be closed or it cannot be determined."""
    closing = _Closing(schema)
    try:
        result = closing.result()
    except (_NamesUnknownError, RecursionError):  # RecursionError: too deeply nested parts
        return schema
    return schema if result == schema else result


class _Closing:
    """One run over a schema. Targets of references are copied to `$defs` where another mode is needed."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._copies: dict[tuple[str, _Mode], str] = {}  # (pointer, mode of its target) -> name in `$defs`
        self._pending: list[tuple[str, object, _Mode]] = []  # copies to make: name, target, mode
        self._visits = 0

    def result(self) -> Schema:
        root = self._schema(self._root, "closed")
        copies: dict[str, object] = {}
        while self._pending:
            name, target, mode = self._pending.pop()
            copies[name] = self._any(target, mode)
        if copies:
            root = {**root, "$defs": {**_mapping(root.get("$defs")), **copies}}
        return root

    # ---- rewriting --------------------------------------------------------------------------------------------------
    def _any(self, value: object, mode: _Mode = "closed") -> object:
        if isinstance(value, list):
            return [self._any(each, mode) for each in value]
        return self._schema(value, mode) if isinstance(value, dict) else value

    def _schema(self, schema: Schema, mode: _Mode) -> Schema:
        self._count()
        if "$id" in schema and schema is not self._root:
            raise _NamesUnknownError  # its references are relative to that id
        is_composed = mode == "closed" and not _is_one_part(schema) and _has_parts(schema)
        inner: _Mode = "open" if is_composed else mode
        result = {key: self._value(key, value, inner) for key, value in schema.items()}
        if mode == "closed" and (is_composed or "properties" in schema):
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
            return  # the schema itself states which other names are allowed
        try:
            names = self._names(schema, set())
        except KeyError:  # a dangling reference: the compiler reports it
            return
        if names is None or not (names or "properties" in schema):
            return
        min_properties = schema.get("minProperties")
        if isinstance(min_properties, int) and min_properties > len(names):
            return
        own = result.get("properties")
        if own is not None and not isinstance(own, dict):
            return
        result["properties"] = {**(own or {}), **{name: True for name in names if name not in (own or {})}}
        result["additionalProperties"] = False

    def _reference(self, pointer: str, mode: _Mode) -> str:
        """Pointer to the target, rewritten in this mode."""
        parts = pointer.split("/")
        if mode == "closed" and (pointer == "#" or (len(parts) == 3 and parts[1] in ("$defs", "definitions"))):
            return pointer  # definitions are closed in place
        if (pointer, mode) not in self._copies:
            try:
                target = self._target(pointer)
            except KeyError:
                return pointer
            name = f"{mode}-{len(self._copies)}"
            while name in _mapping(self._root.get("$defs")):
                name += "'"
            self._copies[pointer, mode] = name
            self._pending.append((name, target, mode))
        return f"#/$defs/{self._copies[pointer, mode]}"

    # ---- reading ----------------------------------------------------------------------------------------------------
    def _names(self, schema: object, seen: set[str]) -> dict[str, None] | None:
        """Properties named by an object or any of its parts, in order; None: other names are explicitly allowed."""
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
        required = [each for each in _list(schema.get("required")) if isinstance(each, str)]
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, each in _mapping(schema.get(key)).items():
                required.append(name)
                required += [one for one in _list(each) if isinstance(one, str)]
                parts.append(each)
        names = dict.fromkeys([*_mapping(schema.get("properties")), *required])
        seen = seen | {""}  # not empty for parts
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
        """Subschema at a JSON pointer. Raises KeyError if the schema has none."""
        if pointer != "#" and not pointer.startswith("#/"):
            raise KeyError(pointer)
        target: object = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict):
                target = target[key]
            else:
                raise KeyError(pointer)
        return target

    def _count(self) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise _NamesUnknownError


def _has_parts(schema: Schema) -> bool:
    return any(key in schema for key in (*_LISTS, *_BRANCHES, "$ref", "dependentSchemas", "dependencies"))


def _is_one_part(schema: Schema) -> bool:
    """True for a mere reference, or mere alternatives: the referenced schemas are then objects of their own."""
    parts = [key for key in (*_LISTS, "$ref") if key in schema]
    return (
        len(parts) == 1 and not _OF_OBJECTS & schema.keys() and (parts != ["allOf"] or len(_list(schema["allOf"])) == 1)
    )


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
