"""Tools and response format of a request: checked, described to the model, and turned into a constraint.

Functions are described in the system message, in the words of Hermes and Qwen2.5, since not every chat template
supports tools; `tool_calls` parses the answer. Which functions can be called is enforced by the constraint alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.api.chat.schema import AllowedChoice, ChatRequest, Function, NamedChoice, Tool
from paceline.api.chat.tool_calls import CLOSE, OPEN
from paceline.api.generation.request import MAX_SCHEMAS, size_of_schema
from paceline.api.generation.schema import JsonFormat, SchemaFormat
from paceline.core.sampling.sampler import Constraint
from paceline.errors import RequestError

_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, some of which may be called."""

    functions: tuple[Function, ...]  # described to the model
    callable: tuple[str, ...]  # names of those it may call
    required: bool = False
    named: bool = False  # the client named the one function to call
    parallel: bool = True
    legacy: bool = False  # requested and answered in the form of `functions`

    def constraint(self, content: Constraint | None) -> Constraint:
        """The constraint on the answer. `content`: that on an answer without calls."""
        tools = [
            {"name": function.name, "parameters": parameters_of(function), "strict": function.strict}
            for function in self.functions
            if function.name in self.callable
        ]
        fields: dict[str, object] = {"tools": tools, "required": self.required, "parallel": self.parallel}
        param = "" if content is None else content.param
        if content is not None and not self.required:
            if content.kind == "grammar":
                raise RequestError(f"{param} holds for the whole answer: it cannot go with tools.", param=param)
            fields["content"] = {"kind": content.kind, "text": content.text}
        return Constraint("tools", json.dumps(fields, ensure_ascii=False), param=param)

    def instructions(self) -> str:
        """The description of the functions for the system message."""
        lines = "\n".join(json.dumps(_signature(function), ensure_ascii=False) for function in self.functions)
        return (
            "# Tools\n\nFunctions that may be called to help with the user's request, as JSON within "
            f"<tools></tools>:\n<tools>\n{lines}\n</tools>\n\n"
            f"To call one, write a JSON object with its name and arguments within {OPEN}{CLOSE}:\n"
            f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
        )


def tool_use(asked: ChatRequest) -> ToolUse | None:
    """The tools of a request; None when none may be called. Raises RequestError (400) that names the field."""
    if asked.functions and asked.tools:
        raise RequestError("functions is the older name of tools: only one of them may be given.", param="functions")
    if asked.functions or asked.function_call is not None:
        return _legacy(asked)
    functions = _functions(asked.tools)
    match asked.tool_choice:
        case NamedChoice(function=chosen):
            check_known([chosen.name], functions, "tool_choice")
            return ToolUse(functions, (chosen.name,), required=True, named=True, parallel=False)
        case AllowedChoice(allowed_tools=allowed):
            names = tuple(dict.fromkeys(tool.function.name for tool in allowed.tools))
            check_known(names, functions, "tool_choice")
            return ToolUse(functions, names, allowed.mode == "required", parallel=asked.parallel_tool_calls)
        case choice:
            if choice == "required" and not functions:
                raise RequestError("tool_choice may only be required when there are tools.", param="tool_choice")
            if choice == "none" or not functions:
                return None
            names = tuple(function.name for function in functions)
            return ToolUse(functions, names, choice == "required", parallel=asked.parallel_tool_calls)


def _legacy(asked: ChatRequest) -> ToolUse | None:
    functions = checked(asked.functions, "functions", "")
    choice = asked.function_call
    if choice is not None and not isinstance(choice, str):
        check_known([choice.name], functions, "function_call")
        return ToolUse(functions, (choice.name,), required=True, named=True, parallel=False, legacy=True)
    if choice == "none" or not functions:
        return None
    return ToolUse(functions, tuple(function.name for function in functions), parallel=False, legacy=True)


def _functions(tools: Sequence[Tool]) -> tuple[Function, ...]:
    functions: list[Function] = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(
                f"Only tools of the type function are served, not {tool.type[:64]!r}.",
                code="unsupported_parameter",
                param=f"tools[{index}].type",
            )
        if tool.function is None:
            raise RequestError(f"The field tools[{index}].function is required.", param=f"tools[{index}].function")
        functions.append(tool.function)
    return checked(functions, "tools", ".function")


def checked(functions: Sequence[Function], field: str, inner: str) -> tuple[Function, ...]:
    """Check that names differ and parameters are schemas of objects. Function i is at `field`[i]`inner` of the body."""
    names: set[str] = set()
    size = 0
    for index, function in enumerate(functions):
        where = f"{field}[{index}]{inner}"
        if function.name in names:
            raise RequestError(f"Two functions have the name {function.name}.", param=f"{where}.name")
        names.add(function.name)
        schema = function.parameters or {}
        if schema.get("type", "object") != "object":
            raise RequestError('The schema of parameters must have the type "object".', param=f"{where}.parameters")
        size += size_of_schema(schema, f"{where}.parameters") + len(function.description or "")
        if size > MAX_SCHEMAS:
            raise RequestError(f"{field} takes more than {MAX_SCHEMAS} characters.", param=field)
    return tuple(functions)


def check_known(names: Sequence[str], functions: Sequence[Function], param: str) -> None:
    for name in names:
        if all(function.name != name for function in functions):
            raise RequestError(f"{param} names the function {name[:64]!r}, which is not among the tools.", param=param)


def parameters_of(function: Function) -> dict[str, object]:
    return _NO_PARAMETERS if function.parameters is None else {"type": "object"} | function.parameters


def _signature(function: Function) -> dict[str, object]:
    described = {} if function.description is None else {"description": function.description}
    body = {"name": function.name} | described | {"parameters": parameters_of(function)}
    return {"type": "function", "function": body}


# ---- the format of an answer ----------------------------------------------------------------------------------------
def format_instructions(asked: ChatRequest, tools: ToolUse | None) -> str | None:
    """The description of the schema of `response_format` for the system message.

    None where a function must be called: such an answer has no content.
    """
    wanted = asked.response_format
    if tools is not None and tools.required:
        return None
    name, about, described = "", "", wanted.schema_ if isinstance(wanted, JsonFormat) else None
    if isinstance(wanted, SchemaFormat):
        named = wanted.json_schema
        described, name = named.schema_, f", {named.name}"
        about = f" ({named.description})" if named.description else ""
    if described is None:
        return None
    only = "" if tools is not None else ", and nothing else"
    return f"Answer with JSON of this schema{name}{about}{only}:\n{json.dumps(described, ensure_ascii=False)}"
