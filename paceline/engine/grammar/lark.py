"""Constraints as grammars in llguidance's dialect of Lark, with JSON schemas as parts. Pure.

llguidance converts GBNF and regular expressions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from paceline.core.sampling.sampler import Constraint
from paceline.engine.grammar.closed_objects import closed
from paceline.engine.grammar.json_schema import (
    MAX_REMAINDERS,
    check_optional,
    has_one_of,
    has_too_many_remainders,
    loosened,
)

# Options of llguidance's JSON: the separators of Python's json.dumps and of JSON.stringify.
_STRICT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_LOOSE = {**_STRICT, "lenient": True, "coerce_one_of": True}
# `no_forcing`: else only one tokenisation would be allowed where only one text can follow.
_HEAD = '%llguidance {"no_forcing": true}\n'
MAX_RULES = 500  # of a grammar: a chain of 2,600 exhausts the stack of llguidance, and with it the program
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


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
    variants = [schema if strict and has_one_of(schema) else closed(schema), schema]
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
    """Text, then calls, then the end; without `required` either may be missing. The format of Qwen2.5 and Hermes."""
    tools = options["tools"]
    if not isinstance(tools, list) or not tools:
        raise ValueError("there are no tools")
    lines: list[str] = []
    for place, tool in enumerate(tools):
        name, parameters = str(tool["name"]), _parameters(tool.get("parameters"))
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        arguments = _part(parameters, tool.get("strict") is True, fits)
        lines += [f'tool_{place}: {begin} arguments_{place} "}}"', f"arguments_{place}: {arguments}"]
    lines.append("call: " + " | ".join(f"tool_{place}" for place in range(len(tools))))
    first = f'"\\n" call "\\n{_CLOSE}"'
    more = f' ("\\n{_OPEN}\\n" call "\\n{_CLOSE}")*' if options["parallel"] else ""
    if options["required"]:
        lines.append(f'start: "{_OPEN}" {first}{more}')
    elif options.get("content") is not None:
        content = _object(options["content"])
        form = _form(Constraint(content["kind"], content["text"]), fits)
        lines += [f'start: content | "{_OPEN}" {first}{more}', f"content: {form}"]
    else:
        # The lazy lexeme ends at the first opening mark, so no text follows a mark that does not start a call.
        lines += [
            f"start: TEXT | open {first}{more}",
            f'open[lazy]: /(.|\\n)*/ "{_OPEN}"',
            "TEXT: /(.|\\n)*/",
        ]
    return _HEAD + "\n".join(lines) + "\n"


def _parameters(schema: object) -> dict[str, object]:
    """Schema of a function's arguments: always an object, an empty one for a function without parameters."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **_object(schema)}


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object, not {json.dumps(value)[:80]}")
    return value
