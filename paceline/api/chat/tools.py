"""Parts of an answer: the model's thoughts, its text, and calls of tools in the format of the model. Pure.

The format is what a `Constraint` of kind `tools` enforces (`engine/families.py`), with any blanks around JSON's
marks. The output does not depend on where the text is split, so that a streamed answer equals a whole one. Marks, the
space around them, and a call that ends before its name is complete are dropped; text that only resembles a call is
content, with its marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from pydantic_core import from_json

from paceline.engine.families import CLOSING, FORMATS, HERMES, TAG, ToolFormat
from paceline.runtime.service import GenerateEvent, GenerationResult, WorkflowStep


@dataclass(frozen=True, slots=True)
class TextOutput:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int  # among the answer's calls
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of the arguments' JSON, exactly as the model wrote it where it writes JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model thinks before it answers, or a line for a step of a workflow."""

    text: str
    step: WorkflowStep | None = None


ParsedOutput = TextOutput | ToolCallStart | ToolCallArguments
Said = Thought | ParsedOutput


class AnswerReader:
    """Reader of the events of one answer."""

    def __init__(self, parser: ToolCallParser | None, *, thinks: bool = True) -> None:
        """parser: of calls that the text may hold. thinks: what the model thinks is told."""
        self._parser = parser
        self._thinks = thinks

    def read(self, event: GenerateEvent) -> Sequence[Said]:
        """Parts that an event adds: none while its text may still become a call."""
        if isinstance(event, GenerationResult):
            return [] if self._parser is None else self._parser.flush(event.reason != "stop")
        if event.step is not None:
            return [Thought(_line(event.step), event.step)]
        if event.thinking:
            return [Thought(event.text)] if event.text and self._thinks else []
        if self._parser is not None:
            return self._parser.push(event.text)
        return [TextOutput(event.text)] if event.text else []

    @property
    def may_call(self) -> bool:
        return self._parser is not None

    @property
    def calls(self) -> bool:
        """The answer has calls, of which the last was not cut off by a limit or a stop string."""
        return self._parser is not None and self._parser.num_calls > 0 and self._parser.complete


def _line(step: WorkflowStep) -> str:
    failed = " (failed)" if step.state == "failed" else ""
    unit = f" on {step.unit}" if step.unit else ""
    return f"{step.stage}{failed}, {step.seconds:.2f} s{unit}: {step.text}\n"


_SPACE = r"[ \t\r\n]*"
_NAME = r"([A-Za-z0-9_-]{1,64})"  # without quote, backslash or bracket, so that a regular expression finds the head


def _atoms(text: str) -> list[str]:
    """Patterns of the parts of a text, with any blanks where it has some, and around JSON's marks."""
    found: list[str] = []
    for part in re.findall(r"\s+|[{}:,\[\]]|.", text):
        if part.isspace():
            found.append(_SPACE)
        else:
            found += [_SPACE, re.escape(part), _SPACE] if part in "{}:,[]" else [re.escape(part)]
    return [each for place, each in enumerate(found) if each != _SPACE or found[place - 1 : place] != [_SPACE]]


class _Frame:
    """Text before the arguments of a call, or behind them, as patterns."""

    def __init__(self, atoms: list[str], before: str = "") -> None:
        """before: pattern of what follows."""
        self.whole = re.compile("".join(atoms) + before)
        self.beginning = re.compile(reduce(lambda rest, atom: f"{atom}(?:{rest})?", reversed(atoms), ""))

    def may_follow(self, text: str) -> bool:
        """The text may become one."""
        return len(text) <= _MAX_FRAME and self.beginning.fullmatch(text) is not None


class _Frames:
    def __init__(self, form: ToolFormat) -> None:
        arguments = "" if form.tagged else r"(?=\{)"
        rest = form.opening.removeprefix(form.mark)
        self.head = _Frame([_SPACE, *_atoms(rest), _NAME, *_atoms(form.middle)], arguments)
        self.tail = _Frame([_SPACE, *_atoms(form.tail)] if form.tail else [])
        self.next = _Frame([*_atoms(form.between), _SPACE, *_atoms(form.head), _NAME, *_atoms(form.middle)], arguments)
        self.end = _Frame([_SPACE, *_atoms(form.end)])


_FRAMES = {form.name: _Frames(form) for form in FORMATS}
_MAX_FRAME = 1_024  # characters of a call beside its arguments; with more of them, all space, it is not a call
_TAG = re.compile(rf"{TAG}([^>\n]*)>(?:\n|(?=[^\n]))")
_CLOSING = CLOSING.rstrip()
_JSON_MARKS = re.compile(r'["\\{}]')


class ToolCallParser:
    """Parser of one answer: `push` its text in parts, then `flush` once."""

    def __init__(
        self,
        form: ToolFormat = HERMES,
        is_text: Callable[[str, str], bool] = lambda name, key: False,  # noqa: ARG005
    ) -> None:
        """is_text: of a function and a parameter, which is a string: of formats that do not say so."""
        self.num_calls = 0  # that have begun
        self.complete = True  # no call is inside its arguments
        self._form, self._frames, self._is_text = form, _FRAMES[form.name], is_text
        self._mark = form.mark  # that begins a call; "" once none can come
        self._state: Literal["text", "head", "arguments", "tail", "next"] = "text"
        self._held = ""  # text that cannot be classified yet
        self._name = ""  # of the current call
        self._key: str | None = None  # of the parameter whose text is being read
        self._keys = 0  # of the current call so far
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
        held = self._held[: len(self._held) - _begun(self._held, self._mark)] if cut else self._held
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
                return (self._parameters if self._form.tagged else self._arguments)(output)
            case "tail":
                return self._tail()
            case "next":
                return self._next(output)

    def _text(self, output: list[ParsedOutput]) -> bool:
        if self._form.alone and self._mark and self._held.strip() and not self._held.lstrip().startswith(self._mark):
            self._mark = ""  # the answer begins with something else
        before, mark, after = self._held.partition(self._mark) if self._mark else (self._held, "", "")
        final = (before if mark else before[: len(before) - _begun(before, self._mark)]).rstrip()
        if final:
            output.append(TextOutput(final))
        if not mark:
            self._held = self._held[len(final) :]
            return False
        self._space, self._held, self._state = before[len(final) :], after, "head"
        if self._form.alone:
            self._mark = ""
        return True

    def _head(self, output: list[ParsedOutput]) -> bool:
        head = self._frames.head.whole.match(self._held)
        if head is not None:
            return self._begin(head, output)
        if self._frames.head.may_follow(self._held):
            return False
        output.append(TextOutput(self._space + self._form.mark))  # not a call
        self._state = "text"
        return True

    def _begin(self, head: re.Match[str], output: list[ParsedOutput]) -> bool:
        self._name, self._keys = head[1], 0
        output.append(ToolCallStart(self.num_calls, self._name))
        self.num_calls += 1
        self.complete = False
        self._held, self._state = self._held[head.end() :], "arguments"
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

    def _parameters(self, output: list[ParsedOutput]) -> bool:
        """Parameters in tags, as JSON."""
        if self._key is None:
            lead = self._held.lstrip()
            tag = _TAG.match(lead)
            if tag is None and (TAG.startswith(lead) or (lead.startswith(TAG) and len(lead) <= _MAX_FRAME)):
                return False
            if tag is None:
                written, self.complete, self._state, self._held = "}" if self._keys else "{}", True, "tail", lead
            else:
                self._key, self._held = tag[1], lead[tag.end() :]
                written = f"{', ' if self._keys else '{'}{_json_text(self._key)}: "
                self._keys += 1
                written += '"' if self._is_text(self._name, self._key) else ""
            output.append(ToolCallArguments(self.num_calls - 1, written))
            return True
        text, closing, rest = self._held.partition(_CLOSING)
        is_text = self._is_text(self._name, self._key)
        if not closing:
            text = text[: len(text) - _begun(text, _CLOSING)] if is_text else ""
        written = _json_text(text)[1:-1] + ('"' if closing else "") if is_text else _as_json(text) if closing else ""
        if written:
            output.append(ToolCallArguments(self.num_calls - 1, written))
        self._held = rest if closing else self._held[len(text) :]
        self._key = None if closing else self._key
        return bool(closing)

    def _tail(self) -> bool:
        tail = self._frames.tail.whole.match(self._held)
        if tail is None and self._frames.tail.may_follow(self._held):
            return False
        self._held = self._held if tail is None else self._held[tail.end() :]
        self._state = "next" if self._form.end else "text"
        return True

    def _next(self, output: list[ParsedOutput]) -> bool:
        """Another call within the same marks, or their end."""
        if (head := self._frames.next.whole.match(self._held)) is not None:
            return self._begin(head, output)
        end = self._frames.end.whole.match(self._held)
        if end is None and (self._frames.next.may_follow(self._held) or self._frames.end.may_follow(self._held)):
            return False
        self._held = self._held if end is None else self._held[end.end() :]
        self._state = "text"
        return True


def arguments_of(text: str) -> object:
    """Arguments as an object, for surfaces that have them so: as far as they were written, where a limit cut them."""
    try:
        return from_json(text, allow_partial=True)
    except ValueError:  # nothing was written, or no JSON, where no mask held the model
        return {}


def _begun(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may begin a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """A text as the JSON that it is, or as a string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return _json_text(text)
    return text


def _joined(output: list[ParsedOutput]) -> list[ParsedOutput]:
    result: list[ParsedOutput] = []
    for one in output:
        if isinstance(one, TextOutput) and result and isinstance(last := result[-1], TextOutput):
            result[-1] = TextOutput(last.text + one.text)
        else:
            result.append(one)
    return result
