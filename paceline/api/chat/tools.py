r"""Incremental parser of tool calls in an answer's text. Pure.

The format is that of Hermes and Qwen2.5, which a `Constraint` of kind `tools` enforces: `<tool_call>\n{"name": ...,
"arguments": {...}}\n</tool_call>`. The output does not depend on where the text is split, so that a streamed answer
equals a whole one. Marks, the space around them, and a call that ends before its name is complete are dropped; text
that only resembles a call is content, with its marks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from pydantic_core import from_json

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
