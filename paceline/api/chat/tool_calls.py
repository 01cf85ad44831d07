"""Calls of functions in an answer's text: from pieces of text, cut anywhere, to content and calls. Pure.

The format is that of Hermes and Qwen2.5, which `core.sampling.constraint` holds a model to: `<tool_call>\\n{"name":
..., "arguments": {...}}\\n</tool_call>`. What is said does not depend on where the pieces were cut, so a streamed
answer and a whole one are the same. Not content: the marks, the space around them, and a call that ends before its name
is whole. What only looks like a call is content, marks and all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from typing import Literal

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call whose name is known. Its arguments follow."""

    index: int  # among the answer's calls
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text that the model wrote as arguments, to the letter."""

    index: int
    text: str


ParsedOutput = Content | ToolCallStart | ToolCallArguments


def _letters(text: str) -> list[str]:
    return [re.escape(letter) for letter in text]


def _beginning(atoms: list[str]) -> re.Pattern[str]:
    """Fits every text that some continuation would make fit `atoms`, one after the other."""
    return re.compile(reduce(lambda rest, atom: f"{atom}(?:{rest})?", reversed(atoms)))


# No name holds a quote, a backslash or a bracket, and arguments are an object: the header is plain to see.
_SPACE = r"[ \t\r\n]*"
_HEAD_ATOMS = [_SPACE, r"\{", _SPACE, *_letters('"name"'), _SPACE, ":", _SPACE, '"', r"([A-Za-z0-9_-]{1,64})", '"']
_HEAD_ATOMS += [_SPACE, ",", _SPACE, *_letters('"arguments"'), _SPACE, ":", _SPACE]
_HEAD = re.compile("".join(_HEAD_ATOMS) + r"(?=\{)")
_HEAD_BEGINNING = _beginning(_HEAD_ATOMS)
_TAIL_ATOMS = [_SPACE, r"\}", _SPACE, *_letters(CLOSE)]
_TAIL = re.compile("".join(_TAIL_ATOMS))
_TAIL_BEGINNING = _beginning(_TAIL_ATOMS)
_MAX_FRAME = 1_024  # characters of a call beside its arguments; with more of them, all space, it is none
_JSON_MARKS = re.compile(r'["\\{}]')


class ToolCallParser:
    """Reads one answer. `push` its text piece by piece, then `flush` once."""

    def __init__(self) -> None:
        self.num_calls = 0  # begun
        self.complete = True  # no call was cut off in its arguments
        self._state: Literal["text", "head", "arguments", "tail"] = "text"
        self._held = ""  # text of which it is not yet known what it is
        self._gap = ""  # space before the mark whose call is being read
        self._depth = 0  # of braces, in the arguments
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[ParsedOutput]:
        said: list[ParsedOutput] = []
        self._held += text
        while self._step(said):
            pass
        return _joined(said)

    def flush(self, cut: bool) -> list[ParsedOutput]:
        """The end. `cut`: the answer was not finished, so that what may have begun a call is dropped."""
        if self._state != "text":
            return []
        held = self._held[: len(self._held) - _mark_begun(self._held)] if cut else self._held
        if self.num_calls:
            held = held.rstrip()
        return [Content(held)] if held else []

    def _step(self, said: list[ParsedOutput]) -> bool:
        """Reads what is held as far as one state goes. False when more text is needed."""
        match self._state:
            case "text":
                return self._text(said)
            case "head":
                return self._head(said)
            case "arguments":
                return self._arguments(said)
            case "tail":
                return self._tail()

    def _text(self, said: list[ParsedOutput]) -> bool:
        before, mark, after = self._held.partition(OPEN)
        final = (before if mark else before[: len(before) - _mark_begun(before)]).rstrip()
        if final:
            said.append(Content(final))
        if not mark:
            self._held = self._held[len(final) :]
            return False
        self._gap, self._held, self._state = before[len(final) :], after, "head"
        return True

    def _head(self, said: list[ParsedOutput]) -> bool:
        head = _HEAD.match(self._held)
        if head is not None:
            said.append(ToolCallStart(self.num_calls, head[1]))
            self.num_calls += 1
            self.complete = False
            self._held, self._state = self._held[head.end() :], "arguments"
            return True
        if len(self._held) <= _MAX_FRAME and _HEAD_BEGINNING.fullmatch(self._held):
            return False
        said.append(Content(self._gap + OPEN))  # no call after all
        self._state = "text"
        return True

    def _arguments(self, said: list[ParsedOutput]) -> bool:
        end = self._end_of_arguments(self._held)
        piece = self._held if end is None else self._held[:end]
        if piece:
            said.append(ToolCallArguments(self.num_calls - 1, piece))
        self._held = self._held[len(piece) :]
        if end is None:
            return False
        self.complete, self._state = True, "tail"
        return True

    def _end_of_arguments(self, text: str) -> int | None:
        """Where the object that began at depth 0 ends in `text`, if it does."""
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


def _mark_begun(text: str) -> int:
    """How many letters at the end of `text` may begin a mark."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)


def _joined(said: list[ParsedOutput]) -> list[ParsedOutput]:
    """Neighbouring pieces of content as one."""
    result: list[ParsedOutput] = []
    for one in said:
        if isinstance(one, Content) and result and isinstance(last := result[-1], Content):
            result[-1] = Content(last.text + one.text)
        else:
            result.append(one)
    return result
