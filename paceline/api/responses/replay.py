"""From stored events back to the response they describe, with the passages of documents that it refers to. Pure.

The log keeps no text of documents, so that removing a document, by whatever program, removes it from stored responses
too. A passage of this side is stored as the id of its chunk, its place in the document likewise, since that may be a
heading; one of the other side, whose removals are not known here, is not stored. What cannot be found any more is "",
without a place. What the answer was written from lies beside the last event, and is never sent.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from paceline.api.http.body import encode_json
from paceline.api.http.errors import Failure
from paceline.api.responses.events import Event, failed
from paceline.api.responses.store import ENDS, EventRow, ResponseRecord
from paceline.runtime.service import AnswerRecord, GenerationResult

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
    """Whether a response is written again where the program that wrote it, alone with its log, has ended."""
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
    """Of the events of an answer that is computed again, those that its rows do not have yet, numbered after them.

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
        """What is new of an event; None if nothing is."""
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
_CHUNK = "chunk"  # key of a reference
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
    cited = [citation.chunk_id for citation in done.citations]
    found = [citation.chunk_id for citation in done.found if citation.file_id]
    for chunk_ids, holders in ((cited, _cited(body)), (found, _results(body))):
        for chunk_id, (holder, key) in zip(chunk_ids if holders else (), holders, strict=True):
            holder[key] = "" if chunk_id is None else {_CHUNK: chunk_id}
            if holder.pop(_PLACE, None) is not None and chunk_id is not None:
                holder[_PLACE] = holder[key]
    return encode_json(body)


def filled(data: bytes, passages: Passages) -> bytes:
    """The JSON of a stored last event with its passages and their places."""
    body = json.loads(data)
    references = [(holder, key) for holder, key in _holders(body) if isinstance(holder[key], dict)]
    if body.pop(_RECORDS, None) is None and not references:
        return data
    known = passages({holder[key][_CHUNK] for holder, key in references})
    for holder, key in references:
        holder[key], place = known.get(holder[key][_CHUNK], ("", ""))
        if holder.pop(_PLACE, None) is not None and place:
            holder[_PLACE] = place
    return encode_json(body)


def records_of(last: EventRow) -> list[AnswerRecord]:
    """What an answer was written from, from the last row of its response as it is stored. Raises
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
