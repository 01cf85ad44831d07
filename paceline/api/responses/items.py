"""Input items of `/v1/responses`: checked, stored, and converted to chat messages. Pure.

Reasoning items and file searches of an earlier answer are accepted, since clients send back what they received, and
dropped: the answer's text holds their result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from paceline.api.chat.schema import Part
from paceline.api.generation.unsupported import unreadable
from paceline.api.responses.schema import InputItem
from paceline.errors import RequestError

Json = dict[str, object]

SKIPPED = frozenset({"reasoning", "file_search_call"})
_TEXTS = ("input_text", "output_text", "text")


def input_items(given: str | Sequence[InputItem], new_id: Callable[[str], str], *, field: str = "input") -> list[Json]:
    """The input as it is stored, listed and continued: every item with an id. Raises RequestError (400).

    `new_id`: makes an id from a prefix such as "msg". `field`: of the body.
    """
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"id": new_id("msg"), "type": "message", "status": "completed", "role": "user", "content": content}]
    return [_item(item, f"{field}[{index}]", new_id) for index, item in enumerate(given) if item.type not in SKIPPED]


def _item(item: InputItem, where: str, new_id: Callable[[str], str]) -> Json:
    status = item.status if item.status in ("in_progress", "completed", "incomplete") else "completed"
    match item.type:
        case "message":
            if item.role is None:
                raise _missing("role", where)
            if item.content is None:
                raise _missing("content", where)
            answered = item.role == "assistant"
            kind = "output_text" if answered else "input_text"
            content = _parts(item.content, kind, f"{where}.content", refusals=answered)
            body: Json = {"type": "message", "role": item.role, "content": content}
        case "function_call":
            for name in ("call_id", "name", "arguments"):
                if getattr(item, name) is None:
                    raise _missing(name, where)
            body = {"type": item.type, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case "custom_tool_call":  # of an earlier turn, at another server: its input is a text
            for name in ("call_id", "name", "input"):
                if getattr(item, name) is None:
                    raise _missing(name, where)
            arguments = json.dumps({"input": item.input}, ensure_ascii=False)
            body = {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": arguments}
        case "function_call_output" | "custom_tool_call_output":
            for name in ("call_id", "output"):
                if getattr(item, name) is None:
                    raise _missing(name, where)
            output = item.output or ""
            text = output if isinstance(output, str) else _joined(_parts(output, "input_text", f"{where}.output"))
            body = {"type": "function_call_output", "call_id": item.call_id, "output": text}
        case _:
            raise RequestError(
                f"An item of the type {item.type[:64]!r} is not supported.",
                code="unsupported_content",
                param=f"{where}.type",
            )
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}[str(body["type"])]
    return {"id": item.id or new_id(prefix), "status": status, **body}


def _parts(content: str | Sequence[Part], kind: str, where: str, *, refusals: bool = False) -> list[Json]:
    if isinstance(content, str):
        return [_part(kind, content)]
    parts: list[Json] = []
    for index, part in enumerate(content):
        if part.type in _TEXTS and part.text is not None:
            parts.append(_part(kind, part.text))
        elif part.type == "refusal" and part.refusal is not None and refusals:
            parts.append({"type": "refusal", "refusal": part.refusal})
        elif part.type in _TEXTS:
            raise _missing("text", f"{where}[{index}]")
        else:
            raise unreadable(part.type, f"{where}[{index}]")
    return parts


def _part(kind: str, text: str) -> Json:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _joined(parts: Iterable[Json]) -> str:
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in parts)


def _missing(name: str, where: str) -> RequestError:
    return RequestError(f"The field {where}.{name} is required.", param=f"{where}.{name}")


def messages_of(items: Iterable[Json]) -> list[Json]:
    """Messages of `/v1/chat/completions` for input items and output items.

    A call belongs to the assistant message it follows, since the model wrote both in one message.
    """
    messages: list[Json] = []
    for item in items:
        match item["type"]:
            case "message":
                content = item["content"]
                assert isinstance(content, list), "made by input_items"
                messages.append({"role": item["role"], "content": _joined(content)})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                calls = messages[-1].setdefault("tool_calls", [])
                assert isinstance(calls, list), "made here"
                calls.append(call)
            case "function_call_output":
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            case _:
                pass  # a file search: its result is in the answer
    return messages
