"""A conversation as the chat template wants it: one role and one text per message.

Parts are joined, `developer` is `system`, calls an assistant made earlier are told in text. Images, sound and files are
refused by name: a text model cannot read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from paceline.api.schema import FunctionCall, Message, Part
from paceline.errors import RequestError

_ROLES = {"developer": "system", "function": "tool"}


def conversation(messages: Sequence[Message]) -> tuple[dict[str, str], ...]:
    """Raises RequestError (400) that names the message and part at fault."""
    return tuple(
        {"role": _ROLES.get(message.role, message.role), "content": _content(message, f"messages[{index}]")}
        for index, message in enumerate(messages)
    )


def _content(message: Message, where: str) -> str:
    calls = [call.function for call in message.tool_calls if call.function is not None]
    if message.function_call is not None:
        calls.append(message.function_call)
    if message.role != "assistant":
        calls = []
    if message.content is None and not calls:
        raise RequestError(f"A message of the role {message.role} needs content.", param=f"{where}.content")
    texts = [_text(message, where), *(_told(call) for call in calls)]
    return "\n".join(text for text in texts if text)


def _text(message: Message, where: str) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "".join(_part(part, message.role, f"{where}.content[{i}]") for i, part in enumerate(message.content))


def _part(part: Part, role: str, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None and role == "assistant":
        return part.refusal
    if part.type in ("text", "refusal"):
        raise RequestError(f"A part of the type {part.type} needs a text.", param=where)
    raise RequestError(
        f"This model reads text only: a part of the type {part.type!r} is not supported.",
        code="unsupported_content",
        param=where,
    )


def _told(call: FunctionCall) -> str:
    """As models trained on tool calls write them; others at least see what was asked."""
    said = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"
