"""JSON schemas as data and as grammars: what takes too long is found, what cannot be enforced relaxed, closed objects
in any order. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from itertools import accumulate
from typing import Any
from urllib.parse import unquote

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from paceline.core.sampling.sampler import Constraint
from paceline.engine.families import BY_NAME, CLOSING, HERMES, TAG, TAG_END, texts_of

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
    return any(common > MAX_REMAINDERS for common in accumulate(_divisors(schema), math.lcm))


def check_optional(schema: object) -> None:
    """Raises TooLarge for an object with more properties that may be left out than MAX_OPTIONAL."""
    for each in _schemas(schema):
        needed = {name for name in _list(each.get("required")) if isinstance(name, str)}
        number = len(_mapping(each.get("properties")).keys() - needed)
        if number > MAX_OPTIONAL:
            raise TooLarge(f"an object of it has {number} properties that may be left out; {MAX_OPTIONAL} may be")


def _rewritten(value: object, change: Callable[[dict[str, object], dict[str, object]], dict[str, object]]) -> object:
    """A copy in which each subschema is what `change` makes of it and of the copy of what it holds."""
    if isinstance(value, list):
        return [_rewritten(each, change) for each in value]
    if not isinstance(value, dict):
        return value
    copied: dict[str, object] = {}
    for key, inner in value.items():
        if key in _NAMED and isinstance(inner, dict):
            copied[key] = {name: _rewritten(schema, change) for name, schema in inner.items()}
        else:
            copied[key] = inner if key in _DATA else _rewritten(inner, change)
    return change(value, copied)


def loosened(schema: dict[str, object]) -> dict[str, object]:
    """The schema without patterns and bounds of numbers; every value that fits the given schema fits this one."""

    def without_limits(given: dict[str, object], copied: dict[str, object]) -> dict[str, object]:
        kept = {key: inner for key, inner in copied.items() if not _is_limit(key, given[key])}
        if "patternProperties" in given:
            kept.pop("additionalProperties", None)  # else the names that a pattern allowed would be forbidden
        return kept

    return _object(_rewritten(schema, without_limits))


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


# Close the objects of a JSON schema: an object with named properties gets no others unless the schema allows them.
#
# JSON Schema allows any further key where `additionalProperties` is absent, as in most programs' schemas, and a small
# model then writes keys up to the token limit. llama.cpp's grammars close such objects too. Every value that fits the
# closed schema fits the given one. Pure.
#
# Composed objects (`allOf`, alternatives or a reference beside `properties`) are closed as a whole, to the names of
# all their parts: a part closed alone would forbid the names of the others, and stays open wherever else it is used.
# Not closed: objects without named properties, objects with a part that explicitly allows other names, and schemas
# below `not`, `if` and `contains`.


Schema = dict[str, object]

_LISTS = ("allOf", "anyOf", "oneOf")  # parts of the same object
_BRANCHES = ("then", "else")  # likewise; no mask enforces them, but the names they require must be possible
_DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
_CONDITIONS = frozenset({"not", "if", "contains"})
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_OF_OBJECTS = frozenset(
    {"properties", "patternProperties", "required", "minProperties", "propertyNames", "$dynamicRef"}
    | {*_OTHERS, *_DEPENDENT, *_BRANCHES}
)
_MAX_VISITS = 20_000  # of parts; a schema that needs more is left unchanged


class _NamesUnknownError(Exception):
    """The names that an object may have cannot be determined."""


def closed(schema: Schema) -> Schema:
    """The schema with its objects closed; as it is given if it cannot be determined which."""
    try:
        return _object(_rewritten(schema, _Closing(schema).closed))
    except (_NamesUnknownError, RecursionError):  # RecursionError: too deeply nested
        return schema


class _Closing:
    """One run over a schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._visits = 0
        self._open: set[int] = set()  # parts of composed objects
        for each in _schemas(root):
            if "$id" in each and each is not root:
                raise _NamesUnknownError  # its references are relative to that id
            if not _is_one_part(each):
                self._open |= {id(part) for part in self._parts(each)[1:]}

    def closed(self, schema: Schema, copied: Schema) -> Schema:
        """copied: of what it holds, changed here."""
        copied |= {key: schema[key] for key in _CONDITIONS & schema.keys()}
        if id(schema) not in self._open and not _is_one_part(schema) and not schema.keys() & {*_OTHERS}:
            self._close(schema, copied)
        return copied

    def _close(self, schema: Schema, result: Schema) -> None:
        parts = self._parts(schema)
        names = self._names(parts)
        if names is None or not (names or "properties" in schema):
            return
        min_properties, own = schema.get("minProperties"), result.get("properties", {})
        if (isinstance(min_properties, int) and min_properties > len(names)) or not isinstance(own, dict):
            return
        if len(parts) > 1 or "properties" in schema:
            result["properties"] = {**own, **{name: True for name in names if name not in own}}
            result["additionalProperties"] = False

    def _parts(self, schema: Schema) -> list[object]:
        """The object itself and all that it is put together of, parts of parts too; None for one that is not here."""
        found: dict[int, object] = {id(schema): schema}
        pending: list[object] = [schema]
        while pending:
            self._visits += 1
            if self._visits > _MAX_VISITS:
                raise _NamesUnknownError
            part = _mapping(pending.pop())
            inner = [each for key in _LISTS for each in _list(part.get(key))]
            inner += [part[key] for key in _BRANCHES if key in part]
            inner += [each for key in _DEPENDENT for each in _mapping(part.get(key)).values()]
            if isinstance(reference := part.get("$ref"), str):
                inner.append(self._target(reference))
            pending += [each for each in inner if id(each) not in found]
            found |= {id(each): each for each in inner}
        return list(found.values())

    @staticmethod
    def _names(parts: list[object]) -> dict[str, None] | None:
        """Properties that an object names by any of its parts, in order; None: others are explicitly allowed."""
        names: dict[str, None] = {}
        for part in parts:
            if part is None:
                return None
            if not isinstance(part, dict):
                names |= dict.fromkeys(each for each in _list(part) if isinstance(each, str))  # `dependentRequired`
                continue
            is_open = "$dynamicRef" in part or (part is not parts[0] and "patternProperties" in part)
            if is_open or any(part.get(key, False) is not False for key in _OTHERS):
                return None
            names |= dict.fromkeys(_mapping(part.get("properties")))
            names |= dict.fromkeys(each for each in _list(part.get("required")) if isinstance(each, str))
            for key in _DEPENDENT:
                names |= dict.fromkeys(_mapping(part.get(key)))
        return names

    def _target(self, pointer: str) -> object:
        """Subschema at a JSON pointer; None if the schema has none."""
        if pointer != "#" and not pointer.startswith("#/"):
            return None
        target: object = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                target = _mapping(target).get(key)
        return target


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


# Constraints as grammars in llguidance's dialect of Lark, with JSON schemas as parts. Pure.
#
# llguidance converts GBNF and regular expressions.


# Options of llguidance's JSON: the separators of Python's json.dumps and of JSON.stringify.
_STRICT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_LOOSE = {**_STRICT, "lenient": True, "coerce_one_of": True}
# `no_forcing`: else only one tokenisation would be allowed where only one text can follow.
_HEAD = '%llguidance {"no_forcing": true}\n'
MAX_RULES = 500  # of a grammar: a chain of 2,600 exhausts the stack of llguidance, and with it the program


def grammar(constraint: Constraint, fits: Callable[[str], bool]) -> str:
    """Grammar of a constraint. fits: True if a grammar compiles.

    Objects with named properties are closed where the schema does not allow others; a schema that is not strict is
    relaxed if it does not compile. Raises ValueError, KeyError or TypeError for a text that `Constraint` does not
    allow.
    """
    match constraint.kind:
        case "tools":
            return _tools(_object(json.loads(constraint.text)), fits)
        case "grammar":
            return _HEAD + _grammar(constraint.text)
        case _:
            return _start(_form(constraint, fits))


def _form(constraint: Constraint, fits: Callable[[str], bool]) -> str:
    """Grammar part of a constraint that is neither `tools` nor `grammar`."""
    match constraint.kind:
        case "json_object":
            return _json({"type": "object"})
        case "json_schema" | "loose_schema" as kind:
            return _part(_object(json.loads(constraint.text)), kind == "json_schema", fits)
        case "regex":
            return f"/{regex_to_lark(constraint.text)}/"
        case "choice":
            return " | ".join(json.dumps(str(text), ensure_ascii=False) for text in json.loads(constraint.text))
        case kind:
            raise ValueError(f"{kind} is no part of a grammar")


def _grammar(text: str) -> str:
    """The grammar in llguidance's dialect of Lark."""
    if "%json" in text:  # whose schemas `_part` would have to check
        raise ValueError("%json is not taken in a grammar: send the schema as a schema")
    if (text.count("::=") or text.count(":")) > MAX_RULES:  # an upper bound: marks in texts count too
        raise ValueError(f"it has more than {MAX_RULES} rules")
    try:
        return any_to_lark(text)
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(f"as GBNF it cannot be read: {error}") from error


def _start(part: str) -> str:
    return f"{_HEAD}start: {part}\n"


def _part(schema: dict[str, object], strict: bool, fits: Callable[[str], bool]) -> str:
    """First variant that fits: objects closed, the schema as given, then both relaxed; the last one if none fits."""
    check_optional(schema)
    if has_too_many_remainders(schema):
        if strict:
            raise ValueError(f"the least common multiple of its multipleOf is more than {MAX_REMAINDERS}")
        schema = loosened(schema)
    # A value that fits two alternatives may fit only one of them closed, so a strict `oneOf` is not closed.
    variants = [schema if strict and any("oneOf" in each for each in _schemas(schema)) else closed(schema), schema]
    if not strict:
        variants += [loosened(each) for each in variants]
    parts = [_json(each, strict=strict) for each in variants]
    return next((part for part in parts[:-1] if fits(_start(part))), parts[-1])


def _json(schema: Mapping[str, object], *, strict: bool = True) -> str:
    """A grammar part of its own, since references in a schema are relative to its root."""
    return f"%json {json.dumps({**schema, 'x-guidance': _STRICT if strict else _LOOSE})}"


def content_of(constraint: Constraint) -> Constraint | None:
    """Constraint on an answer without calls, if there is one."""
    content = json.loads(constraint.text).get("content")
    return None if content is None else Constraint(content["kind"], content["text"], param=constraint.param)


def _tools(options: Mapping[str, object], fits: Callable[[str], bool]) -> str:
    """Text, then calls, then the end; without `required` either may be missing."""
    tools, form = options["tools"], BY_NAME[str(options.get("format", HERMES.name))]
    if not isinstance(tools, list) or not tools:
        raise ValueError("there are no tools")
    lines: list[str] = []
    for place, tool in enumerate(tools):
        name, parameters = str(tool["name"]), _parameters(tool.get("parameters"))
        quoted = name if form.tagged else json.dumps(name)[1:-1]
        strict = tool.get("strict") is True
        if form.tagged:
            arguments = _tagged(parameters, f"value_{place}", lines, strict, fits)
        else:
            arguments = _part(parameters, strict, fits)
        lines += [
            f"tool_{place}: {_text(quoted + form.middle)} arguments_{place} {_text(form.tail)}",
            f"arguments_{place}: {arguments}",
        ]
    lines.append("call: " + " | ".join(f"tool_{place}" for place in range(len(tools))))
    more = f" ({_text(form.between + form.head)} call)*" if options["parallel"] and form.many else ""
    first = f"{_text(form.opening.removeprefix(form.mark))} call{more} {_text(form.end)}"
    if options["required"]:
        lines.append(f"start: {_text(form.mark)} {first}")
    elif options.get("content") is not None:
        content = _object(options["content"])
        form_of_content = _form(Constraint(content["kind"], content["text"]), fits)
        lines += [f"start: content | {_text(form.mark)} {first}", f"content: {form_of_content}"]
    elif form.alone:
        lines += [
            f"start: TEXT | {_text(form.mark)} {first}",
            f"TEXT: /[ \\t\\r\\n]*([^{re.escape(form.mark)} \\t\\r\\n](.|\\n)*)?/",
        ]
    else:
        # The lazy lexeme ends at the first opening mark, so no text follows a mark that does not start a call.
        lines += [
            f"start: TEXT | open {first}",
            f"open[lazy]: /(.|\\n)*/ {_text(form.mark)}",
            "TEXT: /(.|\\n)*/",
        ]
    return _HEAD + "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """A text as it stands; nothing for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _tagged(
    schema: Mapping[str, object], name: str, lines: list[str], strict: bool, fits: Callable[[str], bool]
) -> str:
    """Parameters in tags, in the order of the schema. lines: to which their rules are added, whose names begin so."""
    required, parts = _list(schema.get("required")), list[str]()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, (key, given) in enumerate(_mapping(schema.get("properties")).items()):
        rule, value = f"{name}_{place}", {**shared, **_mapping(given)}
        texts = texts_of(value)
        if texts is None:
            lines += [f"{rule}: json_{rule} {_text(CLOSING)}", f"json_{rule}: {_part(value, strict, fits)}"]
        elif texts:
            lines.append(f"{rule}: ({' | '.join(map(json.dumps, texts))}) {_text(CLOSING)}")
        else:
            lines.append(f"{rule}[lazy]: /(.|\\n)*/ {_text(CLOSING)}")
        parts.append(f"({_text(TAG + key + TAG_END)} {rule}){'' if key in required else '?'}")
    return " ".join(parts) or '""'


def _parameters(schema: object) -> dict[str, object]:
    """Schema of a function's arguments: always an object, an empty one for a function without parameters."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **_object(schema)}


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object, not {json.dumps(value)[:80]}")
    return value
