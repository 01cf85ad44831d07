"""Blocks of an answer in Anthropic's shape, while it is written: a whole answer holds what a streamed one adds up to.

Pure. Citations belong to the text block that ends the answer; where a call ends it, it has none.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from paceline.api.chat.output import annotations_of, step_line
from paceline.api.chat.tool_calls import (
    Content,
    ParsedOutput,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
    arguments_of,
)
from paceline.api.chat.tools import ToolUse
from paceline.api.generation.links import PassageLinks
from paceline.runtime.service import Citation, GenerationResult, WorkflowStep

Json = dict[str, object]


class ContentBuilder:
    """Pushes return events of the stream, without their framing."""

    def __init__(self, tools: ToolUse | None, links: PassageLinks) -> None:
        self._links = links
        self.blocks: list[Json] = []
        self._parser = None if tools is None else ToolCallParser()
        self._open = ""  # type of the block being written
        self._pieces: list[str] = []  # of it

    def step(self, step: WorkflowStep) -> list[Json]:
        """A step of a workflow, as thinking; one that ends within the text is in the report alone."""
        return [] if self._open == "text" else self._add("thinking", step_line(step))

    def push(self, text: str) -> list[Json]:
        if self._parser is None:
            return self._add("text", text) if text else []
        return self._parsed(self._parser.push(text))

    def end(self, done: GenerationResult) -> list[Json]:
        events = [] if self._parser is None else self._parsed(self._parser.flush(done.reason != "stop"))
        if self._open == "text":
            cited = [_citation(one, self._links) for one in done.citations]
            events += [self._delta({"type": "citations_delta", "citation": one}) for one in cited]
            self.blocks[-1] |= {"citations": cited} if cited else {}
        return events + self._close()

    def stop_reason(self, done: GenerationResult) -> str:
        if done.reason == "length":
            return "max_tokens"
        if done.stop:
            return "stop_sequence"
        calls = self._parser is not None and self._parser.num_calls and self._parser.complete
        return "tool_use" if calls else "end_turn"

    def _parsed(self, parts: list[ParsedOutput]) -> list[Json]:
        events: list[Json] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._add("text", text)
                case ToolCallStart(_, name):
                    events += self._begin(
                        "tool_use", {"id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}
                    )
                case ToolCallArguments(_, text):
                    self._pieces.append(text)
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def _add(self, kind: str, text: str) -> list[Json]:
        """Text of that kind, in the block that is open if it is one."""
        signature = {"signature": ""} if kind == "thinking" else {}  # nobody signs it
        begun = [] if self._open == kind else self._begin(kind, {kind: ""} | signature)
        self._pieces.append(text)
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, kind: str, fields: Mapping[str, object]) -> list[Json]:
        closed = self._close()
        self._open = kind
        block: Json = {"type": kind, **fields}
        self.blocks.append(block)
        return [*closed, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[Json]:
        if not self._open:
            return []
        text, kind, self._open, self._pieces = "".join(self._pieces), self._open, "", []
        self.blocks[-1] |= {"input": arguments_of(text)} if kind == "tool_use" else {kind: text}
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _citation(citation: Citation, links: PassageLinks) -> Json:
    """As of a search by the server: what clients know to have a URL."""
    (annotation,) = annotations_of([citation], 0, links)
    named = annotation["url_citation"]
    assert isinstance(named, dict), "made by annotations_of"
    return {
        "type": "web_search_result_location",
        "cited_text": citation.passage,
        "url": named["url"],
        "title": named["title"],
        "encrypted_index": "",  # by which Anthropic finds its own results again
    }
