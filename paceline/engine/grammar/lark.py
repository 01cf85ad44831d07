"""Constraints as llguidance reads them: grammars in its dialect of Lark, with JSON schemas as parts. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from paceline.core.sampling.constraint import Constraint
from paceline.engine.grammar.closed_objects import closed
from paceline.engine.grammar.json_schema import MAX_REMAINDERS, has_one_of, has_too_many_remainders, loosened

# Of llguidance's JSON: what Python's json.dumps and what JSON.stringify write.
_STRICT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_LOOSE = {**_STRICT, "lenient": True, "coerce_one_of": True}
# `no_forcing`: else, where only one text can follow, only one way to cut it into tokens would be allowed.
_HEAD = '%llguidance {"no_forcing": true}\n'
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def grammar(constraint: Constraint, fits: Callable[[str], bool]) -> str:
    """`fits`: whether a grammar compiles. Objects that name properties are closed where a schema leaves that open; a
    schema that is not strict is loosened where its own does not compile.

    Raises ValueError, KeyError or TypeError for a text that is not what `Constraint` says.
    """
    match constraint.kind:
        case "json_object":
            return _start(_json({"type": "object"}))
        case "json_schema" | "loose_schema" as kind:
            return _start(_part(_object(json.loads(constraint.text)), kind == "json_schema", fits))
        case "tools":
            return _tools(_object(json.loads(constraint.text)), fits)


def _start(part: str) -> str:
    return f"{_HEAD}start: {part}\n"


def _part(schema: dict[str, object], strict: bool, fits: Callable[[str], bool]) -> str:
    """The first that fits: with its objects closed, as it is, then both loosened; the last one where none does."""
    if has_too_many_remainders(schema):
        if strict:
            raise ValueError(f"the least common multiple of its multipleOf is more than {MAX_REMAINDERS}")
        schema = loosened(schema)
    # What fits two alternatives fits one of them closed: to the letter, these must stay as they are.
    wanted = [schema if strict and has_one_of(schema) else closed(schema), schema]
    if not strict:
        wanted += [loosened(each) for each in wanted]
    parts = [_json(each, strict=strict) for each in wanted]
    return next((part for part in parts[:-1] if fits(_start(part))), parts[-1])


def _json(schema: Mapping[str, object], *, strict: bool = True) -> str:
    """A part of its own: references in a schema count from its own root."""
    return f"%json {json.dumps({**schema, 'x-guidance': _STRICT if strict else _LOOSE})}"


def content_of(constraint: Constraint) -> Constraint | None:
    """What an answer without calls is held to."""
    asked = json.loads(constraint.text)
    if asked.get("content") is None:
        return None
    return Constraint("json_schema" if asked.get("content_strict") else "loose_schema", json.dumps(asked["content"]))


def _tools(asked: Mapping[str, object], fits: Callable[[str], bool]) -> str:
    """Text, then calls, then the end; without `required` either may be missing. As Qwen2.5 and Hermes write calls."""
    tools = asked["tools"]
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
    more = f' ("\\n{_OPEN}\\n" call "\\n{_CLOSE}")*' if asked["parallel"] else ""
    if asked["required"]:
        lines.append(f'start: "{_OPEN}" {first}{more}')
    elif asked.get("content") is not None:
        content = _part(_object(asked["content"]), asked.get("content_strict") is True, fits)
        lines += [f'start: content | "{_OPEN}" {first}{more}', f"content: {content}"]
    else:
        # The lazy lexeme ends at the first opening mark, so no text goes on behind one that is not a call.
        lines += [
            f"start: TEXT | open {first}{more}",
            f'open[lazy]: /(.|\\n)*/ "{_OPEN}"',
            "TEXT: /(.|\\n)*/",
        ]
    return _HEAD + "\n".join(lines) + "\n"


def _parameters(schema: object) -> dict[str, object]:
    """A function without any takes an empty object; arguments are an object in any case."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **_object(schema)}


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object, not {json.dumps(value)[:80]}")
    return value
