"""The message of one chat choice: deltas while it is generated, and the whole message joined from them. Pure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from paceline.api.chat.tool_calls import Content, ParsedOutput, ToolCallArguments, ToolCallParser, ToolCallStart
from paceline.api.chat.tools import ToolUse
from paceline.runtime.service import GenerationResult

Json = dict[str, object]


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class MessageBuilder:
    """The message of one choice: `push` the text of every event, then `end`."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._parser = None if tools is None else ToolCallParser()
        self._content: list[str] = []
        self._calls: list[_Call] = []
        self.length = 0  # characters of the content

    def push(self, text: str) -> list[Json]:
        """The deltas of a text; none while it may still become a tool call."""
        if self._parser is not None:
            return [self._delta(output) for output in self._parser.push(text)]
        return [self._delta(Content(text))] if text else []

    def end(self, done: GenerationResult) -> list[Json]:
        """The deltas of text that was held back."""
        if self._parser is None:
            return []
        return [self._delta(output) for output in self._parser.flush(done.reason != "stop")]

    def reason(self, done: GenerationResult) -> str:
        """OpenAI's `finish_reason`. A call that was cut off by a limit or a stop string is not reported as one."""
        if self._tools is None or self._parser is None or not self._calls or not self._parser.complete:
            return done.reason
        if done.reason != "stop" or self._tools.named:
            return done.reason
        return "function_call" if self._tools.legacy else "tool_calls"

    def message(self) -> Json:
        """The whole message. Without text, content is null if functions may be called, as in `output.role_chunk`."""
        text = "".join(self._content)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._tools is not None and not text:
            message["content"] = None
        calls: list[Json] = [{"name": call.name, "arguments": "".join(call.arguments)} for call in self._calls]
        if self._tools is not None and self._tools.legacy and calls:
            return message | {"function_call": calls[0]}
        tool_calls = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(self._calls, calls, strict=True)
        ]
        return message | ({"tool_calls": tool_calls} if tool_calls else {})

    def _delta(self, output: ParsedOutput) -> Json:
        legacy = self._tools is not None and self._tools.legacy
        match output:
            case Content(text):
                self._content.append(text)
                self.length += len(text)
                return {"content": text}
            case ToolCallStart(index, name):
                call = _Call(f"call_{secrets.token_hex(12)}", name)
                self._calls.append(call)
                function: Json = {"name": name, "arguments": ""}
                if legacy:
                    return {"function_call": function}
                return {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
            case ToolCallArguments(index, text):
                self._calls[index].arguments.append(text)
                if legacy:
                    return {"function_call": {"arguments": text}}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
