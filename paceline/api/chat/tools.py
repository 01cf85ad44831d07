"""Tools and response format of a request: checked, described to the model, and turned into a constraint.

Functions are described in the system message, in the words of Hermes and Qwen2.5, since not every chat template
supports tools; `tool_calls` parses the answer. Which functions can be called is enforced by the constraint alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from pydantic_core import from_json

from paceline.api.chat.schema import AllowedChoice, ChatRequest, Function, NamedChoice, Tool
from paceline.api.generation.request import MAX_SCHEMAS, size_of_schema
from paceline.api.generation.schema import JsonFormat, SchemaFormat
from paceline.core.sampling.sampler import Constraint
from paceline.errors import RequestError

# Incremental parser of tool calls in an answer's text. Pure.
#
# The format is that of Hermes and Qwen2.5, which a `Constraint` of kind `tools` enforces: `<tool_call>\n{"name": ...,
# "arguments": {...}}\n</tool_call>`. The output does not depend on where the text is split, so that a streamed answer
# equals a whole one. Marks, the space around them, and a call that ends before its name is complete are dropped; text
# that only resembles a call is content, with its marks.


OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class TextOutput:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a call, with its name. Its arguments follow."""

    index: int  # among the answer's calls
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of the arguments' JSON, exactly as the model wrote it."""

    index: int
    text: str


ParsedOutput = TextOutput | ToolCallStart | ToolCallArguments


def _letters(text: str) -> list[str]:
    return [re.escape(letter) for letter in text]


def _beginning(atoms: list[str]) -> re.Pattern[str]:
    """Pattern of all prefixes of texts that match the sequence of `atoms`."""
    return re.compile(reduce(lambda rest, atom: f"{atom}(?:{rest})?", reversed(atoms)))


# Names hold no quote, backslash or bracket, and arguments are an object, so that a regular expression finds the header.
_SPACE = r"[ \t\r\n]*"
_HEAD_ATOMS = [_SPACE, r"\{", _SPACE, *_letters('"name"'), _SPACE, ":", _SPACE, '"', r"([A-Za-z0-9_-]{1,64})", '"']
_HEAD_ATOMS += [_SPACE, ",", _SPACE, *_letters('"arguments"'), _SPACE, ":", _SPACE]
_HEAD = re.compile("".join(_HEAD_ATOMS) + r"(?=\{)")
_HEAD_BEGINNING = _beginning(_HEAD_ATOMS)
_TAIL_ATOMS = [_SPACE, r"\}", _SPACE, *_letters(CLOSE)]
_TAIL = re.compile("".join(_TAIL_ATOMS))
_TAIL_BEGINNING = _beginning(_TAIL_ATOMS)
_MAX_FRAME = 1_024  # characters of a call beside its arguments; with more of them, all space, it is not a call
_JSON_MARKS = re.compile(r'["\\{}]')


class ToolCallParser:
    """Parser of one answer: `push` its text in parts, then `flush` once."""

    def __init__(self) -> None:
        self.num_calls = 0  # that have begun
        self.complete = True  # no call is inside its arguments
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._held = ""  # text that cannot be classified yet
        self._space = ""  # before the mark of the current call
        self._depth = 0  # of braces in the arguments
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[ParsedOutput]:
        output: list[ParsedOutput] = []
        self._held += text
        while self._step(output):
            pass
        return _joined(output)

    def flush(self, cut: bool) -> list[ParsedOutput]:
        """The rest of the content. `cut`: the answer was not finished, so the possible start of a mark is dropped."""
        if self._state != "text":
            return []
        held = self._held[: len(self._held) - _mark_begun(self._held)] if cut else self._held
        if self.num_calls:
            held = held.rstrip()
        return [TextOutput(held)] if held else []

    def _step(self, output: list[ParsedOutput]) -> bool:
        """Parse as far as the current state goes. False when more text is needed."""
        match self._state:
            case "text":
                return self._text(output)
            case "head":
                return self._head(output)
            case "arguments":
                return self._arguments(output)
            case "tail":
                return self._tail()

    def _text(self, output: list[ParsedOutput]) -> bool:
        before, mark, after = self._held.partition(OPEN)
        final = (before if mark else before[: len(before) - _mark_begun(before)]).rstrip()
        if final:
            output.append(TextOutput(final))
        if not mark:
            self._held = self._held[len(final) :]
            return False
        self._space, self._held, self._state = before[len(final) :], after, "head"
        return True

    def _head(self, output: list[ParsedOutput]) -> bool:
        head = _HEAD.match(self._held)
        if head is not None:
            output.append(ToolCallStart(self.num_calls, head[1]))
            self.num_calls += 1
            self.complete = False
            self._held, self._state = self._held[head.end() :], "arguments"
            return True
        if len(self._held) <= _MAX_FRAME and _HEAD_BEGINNING.fullmatch(self._held):
            return False
        output.append(TextOutput(self._space + OPEN))  # not a call
        self._state = "text"
        return True

    def _arguments(self, output: list[ParsedOutput]) -> bool:
        end = self._end_of_arguments(self._held)
        text = self._held if end is None else self._held[:end]
        if text:
            output.append(ToolCallArguments(self.num_calls - 1, text))
        self._held = self._held[len(text) :]
        if end is None:
            return False
        self.complete, self._state = True, "tail"
        return True

    def _end_of_arguments(self, text: str) -> int | None:
        """The position in `text` after the end of the arguments' object; None if it goes on."""
        if not text:
            return None
        skip, self._escaped = (0 if self._escaped else -1), False  # the letter after a backslash
        for mark in _JSON_MARKS.finditer(text):
            at = mark.start()
            if at == skip:
                continue
            if self._in_string:
                if mark[0] == "\\":
                    skip = at + 1
                self._in_string = mark[0] != '"'
            elif mark[0] == '"':
                self._in_string = True
            elif mark[0] == "{":
                self._depth += 1
            elif mark[0] == "}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._escaped = skip == len(text)
        return None

    def _tail(self) -> bool:
        tail = _TAIL.match(self._held)
        if tail is None and len(self._held) <= _MAX_FRAME and _TAIL_BEGINNING.fullmatch(self._held):
            return False
        self._held = self._held if tail is None else self._held[tail.end() :]
        self._state = "text"
        return True


def arguments_of(text: str) -> object:
    """Arguments as an object, for surfaces that have them so: as far as they were written, where a limit cut them."""
    try:
        return from_json(text, allow_partial=True)
    except ValueError:  # nothing was written, or no JSON, where no mask held the model
        return {}


def _mark_begun(text: str) -> int:
    """The number of characters at the end of `text` that may begin a mark."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)


def _joined(output: list[ParsedOutput]) -> list[ParsedOutput]:
    """Join adjacent contents."""
    result: list[ParsedOutput] = []
    for one in output:
        if isinstance(one, TextOutput) and result and isinstance(last := result[-1], TextOutput):
            result[-1] = TextOutput(last.text + one.text)
        else:
            result.append(one)
    return result


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
