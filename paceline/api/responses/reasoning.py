"""The reasoning item of a response: a line for each step of a workflow, as parts of its summary. Pure."""

from __future__ import annotations

from typing import Protocol

Json = dict[str, object]


class ItemEvent(Protocol):
    """Makes an event of the item being written."""

    def __call__(self, kind: str, **fields: object) -> tuple[str, Json]: ...


class Reasoning:
    """An item being written; each step is a whole part of its summary."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._parts: list[Json] = []

    def body(self, status: str) -> Json:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": list(self._parts)}

    def add(self, line: str, event: ItemEvent) -> list[tuple[str, Json]]:
        """The events of one more line."""
        index, part = len(self._parts), _part(line)
        self._parts.append(part)
        return [
            event("response.reasoning_summary_part.added", summary_index=index, part=_part("")),
            event("response.reasoning_summary_text.delta", summary_index=index, delta=line),
            event("response.reasoning_summary_text.done", summary_index=index, text=line),
            event("response.reasoning_summary_part.done", summary_index=index, part=part),
        ]


def _part(text: str) -> Json:
    return {"type": "summary_text", "text": text}
