"""Conversion of generation events to the events of `/v1/responses`, and of stored ones back to the response that they
describe. Pure.

The order is OpenAI's: created, in_progress; for each item output_item.added, its parts and deltas, output_item.done;
and one last event, which holds the whole response: completed, incomplete or failed. A cancelled response ends with
`response.incomplete` whose response has the status `cancelled`, since OpenAI has no event for it. Source:
openai-openapi 2.3.0, ResponseStreamEvent.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import msgspec

from paceline.api.chat.output import UNNAMED, cited, logprob_items, optional, summary
from paceline.api.chat.tools import AnswerReader, Said, TextOutput, Thought, ToolCallArguments, ToolCallStart
from paceline.api.http.body import Json, encode_json
from paceline.api.http.errors import Failure
from paceline.api.http.routing import NO_ADDRESSES, Addresses
from paceline.api.responses.store import ENDS, EventRow, ResponseRecord
from paceline.rag.store.files import FILE_PREFIX
from paceline.rag.store.vector_stores import AttributesOf
from paceline.runtime.service import AnswerRecord, Citation, GenerateEvent, GenerationResult
from paceline.strategies.base import Side

Event = tuple[str, Json]  # its type and its body, sequence number included
ItemType = Literal["message", "function_call", "reasoning"]
ItemStatus = Literal["completed", "incomplete"]


@dataclass(frozen=True, slots=True)
class Search:
    """A search that a `file_search` tool asks for. The output begins with its call."""

    query: str
    results: bool  # whether the call shows the passages it found
    attributes: AttributesOf


@dataclass(eq=False)
class ResponseEvents:
    """Encoder of one response: `begin`, then `take` for every event up to the GenerationResult; or `fail` or `cancel`
    in its place."""

    first: Json  # the response before anything is written, with all fields
    _: KW_ONLY
    reader: AnswerReader  # of the generation's events
    search: Search | None = None
    new_id: Callable[[str], str]  # makes an id from a prefix such as "msg"
    clock: Callable[[], int]  # Unix time, s
    links: Addresses = NO_ADDRESSES
    report: bool = False  # deltas say whose documents decided them, the end how it was written, as in a chat

    def __post_init__(self) -> None:
        self._sequence = 0
        self._output: list[Json] = []  # finished items
        self._item: _Item | None = None  # that is being written
        self._logprobs: list[Json] = []  # of text that the parser holds back

    def begin(self) -> list[Event]:
        return [
            self._event("response.created", response=self.first),
            self._event("response.in_progress", response=self.first),
            *([] if self.search is None else self._search_call(self.search)),
        ]

    def take(self, event: GenerateEvent) -> list[Event]:
        """The events of a text delta; of a GenerationResult, all that are left."""
        said = self.reader.read(event)
        if isinstance(event, GenerationResult):
            return self._end(self._encode(said), event)
        if not event.thinking:
            self._logprobs += logprob_items(event)
            if not said and event.logprobs and not self.reader.may_call:
                said = [TextOutput("")]  # a token that is an incomplete character
        return self._encode(said, event.lane)

    def fail(self, failure: Failure) -> list[Event]:
        """The last event of a failed response, with the output so far."""
        return [self._event("response.failed", response=failed(self.first | {"output": self._so_far()}, failure))]

    def cancel(self) -> list[Event]:
        response = self.first | {"status": "cancelled", "output": self._so_far()}
        return [self._event("response.incomplete", response=response)]

    def _search_call(self, search: Search) -> list[Event]:
        """The events of the search call. Its results are known at the end only: the last event has them."""
        call: Json = {
            "id": self.new_id("fs"),
            "type": "file_search_call",
            "status": "in_progress",
            "queries": [search.query],
            "results": None,
        }
        events = [self._item_event("response.output_item.added", item=call)]
        for stage in ("in_progress", "searching", "completed"):
            events.append(self._item_event(f"response.file_search_call.{stage}", item_id=call["id"]))
        call = call | {"status": "completed"}
        events.append(self._item_event("response.output_item.done", item=call))
        self._output.append(call)
        return events

    # ---- items ------------------------------------------------------------------------------------------------------
    def _encode(self, said: Iterable[Said], lane: Side | None = None) -> list[Event]:
        events: list[Event] = []
        for part in said:
            match part:
                case Thought(text, None):
                    events += self._thought(text)
                case Thought(line):
                    events += self._step(line)
                case TextOutput(text):
                    events += self._text(text, lane)
                case ToolCallStart(_, name):
                    fields = {"id": self.new_id("fc"), "call_id": self.new_id("call"), "name": name}
                    events += self._begin("function_call", **fields)
                case ToolCallArguments(_, text):
                    assert self._item is not None, "a call begins before its arguments"
                    self._item.text.append(text)
                    events.append(self._delta("response.function_call_arguments.delta", delta=text))
        return events

    def _begin(self, kind: ItemType, **fields: object) -> list[Event]:
        """Begin an item, after the end of the one before. fields: id and others that it has from the beginning."""
        events = self._close("completed")
        self._item = item = _Item(kind, fields)
        return [*events, self._item_event("response.output_item.added", item=item.body("in_progress"))]

    def _step(self, line: str) -> list[Event]:
        """A step of a workflow: a part of the summary of a reasoning item, which ends where the answer begins. A step
        after that is in the report alone."""
        events = self._begin("reasoning", id=self.new_id("rs")) if self._item is None else []
        assert self._item is not None
        if self._item.type == "reasoning":
            index = len(self._item.summary)
            part: Json = {"type": "summary_text", "text": line}
            self._item.summary.append(part)
            for kind, fields in (
                ("part.added", {"part": part | {"text": ""}}),
                ("text.delta", {"delta": line}),
                ("text.done", {"text": line}),
                ("part.done", {"part": part}),
            ):
                events.append(self._delta(f"response.reasoning_summary_{kind}", summary_index=index, **fields))
        return events

    def _thought(self, text: str) -> list[Event]:
        """Thinking of the model: the content of the reasoning item, behind the steps."""
        events = [] if self._is("reasoning") else self._begin("reasoning", id=self.new_id("rs"))
        assert self._item is not None
        if not self._item.text:
            events.append(self._part("response.content_part.added", part=self._item.part()))
        self._item.text.append(text)
        return [*events, self._part("response.reasoning_text.delta", delta=text)]

    def _text(self, text: str, lane: Side | None = None) -> list[Event]:
        events: list[Event] = []
        if not self._is("message"):
            events = self._begin("message", id=self.new_id("msg"), role="assistant")
            assert self._item is not None
            events.append(self._part("response.content_part.added", part=self._item.part()))
        assert self._item is not None
        logprobs, self._logprobs = self._logprobs, []
        if text or logprobs:
            self._item.text.append(text)
            self._item.logprobs += logprobs
            told = {"paceline": {"lane": lane}} if self.report else {}
            events.append(self._part("response.output_text.delta", delta=text, logprobs=logprobs, **told))
        return events

    def _is(self, kind: ItemType) -> bool:
        return self._item is not None and self._item.type == kind

    def _close(self, status: ItemStatus) -> list[Event]:
        item, events = self._item, list[Event]()
        if item is None:
            return events
        text = "".join(item.text)
        if item.type == "function_call":
            name = item.fields["name"]
            events.append(self._delta("response.function_call_arguments.done", name=name, arguments=text))
        elif item.type == "message":
            events.append(self._part("response.output_text.done", text=text, logprobs=item.logprobs))
        elif text:
            events.append(self._part("response.reasoning_text.done", text=text))
        if item.type != "function_call" and events:
            events.append(self._part("response.content_part.done", part=item.part()))
        body = item.body(status)
        events.append(self._item_event("response.output_item.done", item=body))
        self._output.append(body)
        self._item = None
        return events

    def _end(self, events: list[Event], done: GenerationResult) -> list[Event]:
        incomplete = done.reason == "length"
        answered = any(item["type"] not in ("file_search_call", "reasoning") for item in self._output)
        item = self._item
        cut = incomplete and item is not None and item.type == "reasoning" and item.text  # in its thinking
        if (item is None or item.type == "reasoning") and not cut and (not answered or self._logprobs):
            events += self._text("")  # an empty answer is still a message
        if done.citations and self._item is not None and self._item.type == "message":
            length = sum(map(len, self._item.text))
            self._item.annotations = [_annotation(one, length, self.links) for one in done.citations]
            events += [
                self._part("response.output_text.annotation.added", annotation_index=index, annotation=annotation)
                for index, annotation in enumerate(self._item.annotations)
            ]
        events += self._close("incomplete" if incomplete else "completed")
        if self.search is not None and self.search.results:
            results = [_result(one, self.search) for one in done.found if one.file_id]
            self._output[0] = self._output[0] | {"results": results}
        response = self.first | {
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "completed_at": None if incomplete else self.clock(),
            "output": self._output,
            "usage": usage(done),
            **optional("paceline", summary(self.report, [done], self.links)),
        }
        return [*events, self._event("response.incomplete" if incomplete else "response.completed", response=response)]

    def _so_far(self) -> list[Json]:
        return [*self._output, *([] if self._item is None else [self._item.body("incomplete")])]

    # ---- bodies -----------------------------------------------------------------------------------------------------
    def _event(self, kind: str, **fields: object) -> Event:
        body: Json = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return kind, body

    def _item_event(self, kind: str, **fields: object) -> Event:
        return self._event(kind, output_index=len(self._output), **fields)

    def _delta(self, kind: str, **fields: object) -> Event:
        assert self._item is not None
        return self._item_event(kind, item_id=self._item.fields["id"], **fields)

    def _part(self, kind: str, **fields: object) -> Event:
        return self._delta(kind, content_index=0, **fields)


class _Item:
    """An item being written. Reasoning has a line for each step of a workflow, as parts of its summary, and what the
    model thinks, as its content."""

    def __init__(self, kind: ItemType, fields: Json) -> None:
        """fields: its id, and what else is known of it. The `call_id` is named by the item that brings the output of a
        function."""
        self.type = kind
        self.fields = fields
        self.text: list[str] = []  # of a message, of a call's arguments or of thinking
        self.summary: list[Json] = []
        self.logprobs: list[Json] = []
        self.annotations: list[Json] = []

    def part(self) -> Json:
        text = "".join(self.text)
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs, annotations = [*self.logprobs], [*self.annotations]
        return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": logprobs}

    def body(self, status: str) -> Json:
        body: Json = {"id": self.fields["id"], "type": self.type, "status": status} | self.fields
        if self.type == "function_call":
            return body | {"arguments": "".join(self.text)}
        is_empty = not self.text if self.type == "reasoning" else status == "in_progress"
        summary = {"summary": [*self.summary]} if self.type == "reasoning" else {}
        return body | summary | {"content": [] if is_empty else [self.part()]}


def _annotation(citation: Citation, length: int, links: Addresses) -> Json:
    """A `file_citation` for an uploaded file; for another document a `url_citation`, without the place in it, which may
    be a heading: stored responses hold no text of documents.

    `length`: characters of the text, which is cited as a whole. Chat nests the URL in an object; responses do not.
    """
    if citation.file_id.startswith(FILE_PREFIX):
        named = {"file_id": citation.file_id, "filename": citation.document}
        return {"type": "file_citation", **named, "index": length}
    return {"type": "url_citation", "start_index": 0, "end_index": length, **cited(citation, links, places=False)}


def _result(citation: Citation, search: Search) -> Json:
    return {
        "file_id": citation.file_id,
        "filename": citation.document or UNNAMED,
        "score": citation.score,
        "text": citation.passage,
        "attributes": search.attributes(citation.store, citation.file_id),
    }


def usage(done: GenerationResult) -> Json:
    return {
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": int(done.stats.get("cached_tokens", 0)), "cache_write_tokens": 0},
        "output_tokens": done.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": int(done.stats.get("reasoning_tokens", 0))},
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }


def failed(response: Json, failure: Failure) -> Json:
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(failure.status, "server_error")
    return response | {"status": "failed", "error": {"code": code, "message": failure.message}}


# ---- from stored events back to the response, with the passages of documents that it refers to ----------------------
# The log keeps no text of documents, so that removing a document, by whatever program, removes it from stored responses
# too. A passage of this side is stored as the id of its chunk, its place in the document likewise, since that may be a
# heading; one of the other side, whose removals are not known here, is not stored. What cannot be found any more is "",
# without a place. What the answer was written from lies beside the last event, and is never sent.
RESTARTED = Failure(500, "The server was restarted before this response was finished.", "server_error")


def replay(rows: Sequence[EventRow]) -> dict[str, Any]:
    """The response after these events. `rows`: all of one response from the first on, or the last one alone."""
    response: dict[str, Any] = {}
    output: list[dict[str, Any]] = []
    for row in rows:
        body = json.loads(row.data)
        if "response" in body:
            response = body["response"]
            if row.type in ENDS:
                return response
            output = []
            continue
        index = body["output_index"]
        match row.type:
            case "response.output_item.added":
                output.append(body["item"])
            case "response.output_item.done":
                output[index] = body["item"]
            case "response.content_part.added":
                output[index]["content"].append(body["part"])
            case "response.output_text.delta":
                part = output[index]["content"][body["content_index"]]
                part["text"] += body["delta"]
                part["logprobs"] += body["logprobs"]
            case "response.output_text.annotation.added":
                output[index]["content"][body["content_index"]]["annotations"].append(body["annotation"])
            case "response.reasoning_text.delta":
                output[index]["content"][body["content_index"]]["text"] += body["delta"]
            case "response.reasoning_summary_part.added":
                output[index]["summary"].append(body["part"])
            case "response.reasoning_summary_text.delta":
                part = output[index]["summary"][body["summary_index"]]
                part["text"] += body["delta"]
            case "response.function_call_arguments.delta":
                output[index]["arguments"] += body["delta"]
            case _:
                pass  # events that end a part repeat its deltas
    return response | {"output": output}


def goes_on(record: ResponseRecord) -> bool:
    """True for a response that is written again where the program that wrote it, alone with its log, has ended."""
    return bool(json.loads(record.request).get("goes_on"))


def close_interrupted(rows: list[EventRow], failure: Failure = RESTARTED) -> list[EventRow]:
    """The row that ends a response whose process died: failed, with the text written so far. See `EventLog`."""
    last = rows[-1]
    if last.type in ENDS:
        return []
    response = replay(rows)
    items = [one | ({"status": "incomplete"} if one["status"] == "in_progress" else {}) for one in response["output"]]
    kind, sequence = "response.failed", last.sequence + 1
    response = failed(response | {"output": items}, failure)
    return [EventRow(sequence, kind, encode_json({"type": kind, "sequence_number": sequence, "response": response}))]


# ---- an answer that another server has begun -------------------------------------------------------------------------
class DivergedError(Exception):
    """The answer, computed again, is not what has been told of it."""


_TEXT = {
    "response.output_text.delta": "content_index",
    "response.reasoning_text.delta": "content_index",
    "response.function_call_arguments.delta": "output_index",
}


class Unsaid:
    """The events of an answer that is computed again which its rows do not have yet, numbered after them.

    Pieces of text may be cut elsewhere this time: of each part of the output the text is compared. Events of other
    kinds are the same ones in the same order; lines of a workflow's steps, which tell times, are not compared.
    """

    def __init__(self, rows: Sequence[EventRow]) -> None:
        self._next = len(rows)
        self._text: dict[tuple[str, int, int], str] = {}  # that is told and not yet computed again
        self._logprobs: Counter[tuple[str, int, int]] = Counter()  # likewise
        self._others: deque[str] = deque()  # types of events, likewise
        self.ids: list[str] = []  # of items and calls, in the order of their creation
        self.text = ""  # of all parts together
        for row in rows:
            body = json.loads(row.data)
            if row.type in _TEXT:
                self.text += body["delta"]
                part = _part(body)
                self._text[part] = self._text.get(part, "") + body["delta"]
                self._logprobs[part] += len(body.get("logprobs", ()))
                continue
            self._others.append(row.type)
            if row.type == "response.output_item.added":
                item = body["item"]
                self.ids += [item["id"], *([item["call_id"]] if "call_id" in item else [])]

    def of(self, events: Sequence[Event]) -> list[Event]:
        """Raises DivergedError."""
        return [(kind, self._numbered(rest)) for kind, body in events if (rest := self._rest(kind, body)) is not None]

    def _rest(self, kind: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The part of an event that is new; None if nothing is."""
        if kind not in _TEXT:
            if not self._others:
                return self._new(body)
            if self._others.popleft() != kind:
                raise DivergedError
            return None
        part, delta = _part(body), body["delta"]
        told = self._text.get(part, "")
        common = min(len(told), len(delta))
        if told[:common] != delta[:common]:
            raise DivergedError
        self._text[part] = told[common:]
        logprobs = body.get("logprobs", [])
        known = min(self._logprobs[part], len(logprobs))
        self._logprobs[part] -= known
        if common == len(delta) and known == len(logprobs):
            return None
        return self._new(body | {"delta": delta[common:]} | ({"logprobs": logprobs[known:]} if logprobs else {}))

    def _new(self, body: dict[str, Any]) -> dict[str, Any]:
        """Nothing is new before all that was told has come again."""
        if self._others or any(self._text.values()):
            raise DivergedError
        return body

    def _numbered(self, body: dict[str, Any]) -> dict[str, Any]:
        self._next += 1
        return body | {"sequence_number": self._next - 1}


def _part(body: Mapping[str, Any]) -> tuple[str, int, int]:
    return body["type"], body["output_index"], body[_TEXT[body["type"]]]


# ---- passages --------------------------------------------------------------------------------------------------------
_CHUNK, _MARK = "chunk", "mark"  # keys of a reference; a database that was made anew gives numbers of chunks again
_PLACE = "place"
_RECORDS = "written_from"

Passages = Callable[[Collection[int]], Mapping[int, tuple[str, str]]]  # chunk ids → (text, place) of those that exist


def stored_form(last: Mapping[str, Any], done: GenerationResult) -> bytes | None:
    """The JSON of the last event as it is stored, with the answer's records; None if it holds no passage and there are
    none. `last`: its body, made from `done`."""
    if not (done.records or any(_holders(last))):
        return None
    body = json.loads(encode_json(last)) | (
        {_RECORDS: msgspec.to_builtins(done.records, str_keys=True)} if done.records else {}
    )
    quoted = [citation.chunk_id for citation in done.citations]
    found = [citation.chunk_id for citation in done.found if citation.file_id]
    for chunk_ids, holders in ((quoted, _cited(body)), (found, _results(body))):
        for chunk_id, (holder, key) in zip(chunk_ids if holders else (), holders, strict=True):
            holder[key] = "" if chunk_id is None else {_CHUNK: chunk_id, _MARK: _mark(holder[key])}
            if holder.pop(_PLACE, None) is not None and chunk_id is not None:
                holder[_PLACE] = holder[key]
    return encode_json(body)


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def filled(data: bytes, passages: Passages) -> bytes:
    """The JSON of a stored last event with its passages and their places."""
    body = json.loads(data)
    references = [(holder, key) for holder, key in _holders(body) if isinstance(holder[key], dict)]
    if body.pop(_RECORDS, None) is None and not references:
        return data
    known = passages({holder[key][_CHUNK] for holder, key in references})
    for holder, key in references:
        text, place = known.get(holder[key][_CHUNK], ("", ""))
        is_it = _mark(text) == holder[key].get(_MARK)
        holder[key], place = (text, place) if is_it else ("", "")
        if holder.pop(_PLACE, None) is not None and place:
            holder[_PLACE] = place
    return encode_json(body)


def records_of(last: EventRow) -> list[AnswerRecord]:
    """Records of what an answer was written from, of the last row of its response as it is stored. Raises
    `msgspec.ValidationError` for records that another version has kept."""
    return msgspec.convert(json.loads(last.data).get(_RECORDS, []), list[AnswerRecord], str_keys=True)


def kept_items(last: Mapping[str, Any]) -> list[bytes]:
    """The JSON of the output's items, without passages, which no conversation keeps. `last`: the last event's body."""
    items: list[bytes] = []
    for item in last["response"]["output"]:
        results = item.get("results")
        shown = item | {"results": [one | {"text": ""} for one in results]} if results else item
        items.append(encode_json(shown))
    return items


def _holders(body: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects that hold passages, each with the key."""
    yield from _cited(body)
    yield from _results(body)


def _cited(body: Mapping[str, Any]) -> Sequence[tuple[dict[str, Any], str]]:
    report = body["response"].get("paceline") or {}
    return [(citation, "passage") for citation in report.get("citations", ())]


def _results(body: Mapping[str, Any]) -> Sequence[tuple[dict[str, Any], str]]:
    searches = [item for item in body["response"]["output"] if item["type"] == "file_search_call"]
    return [(result, "text") for search in searches for result in search.get("results") or ()]
