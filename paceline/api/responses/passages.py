"""Passages in the last event of a response: stored as references, and filled in when the event is read.

The log keeps no text of documents, so that removing a document, by whatever program, removes it from stored responses
too. A passage of this side is stored as the id of its chunk, its place in the document likewise, since that may be a
heading; one of the other side, whose removals are not known here, is not stored. What cannot be found any more is "",
without a place. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from paceline.api.http.errors import encode_json
from paceline.runtime.service import GenerationResult

_CHUNK = "chunk"  # key of a reference
_PLACE = "place"

Passages = Callable[[Collection[int]], Mapping[int, tuple[str, str]]]  # chunk ids → (text, place) of those that exist


def stored_form(last: Mapping[str, Any], done: GenerationResult) -> bytes | None:
    """The JSON of the last event as it is stored; None if it holds no passage. `last`: its body, made from `done`."""
    if not any(_holders(last)):
        return None
    body = json.loads(encode_json(last))
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
    if not references:
        return data
    known = passages({holder[key][_CHUNK] for holder, key in references})
    for holder, key in references:
        holder[key], place = known.get(holder[key][_CHUNK], ("", ""))
        if holder.pop(_PLACE, None) is not None and place:
            holder[_PLACE] = place
    return encode_json(body)


def without_passages(data: bytes) -> bytes:
    """The JSON of a last event that was stored with its passages, without them."""
    body = json.loads(data)
    holders = list(_holders(body))
    for holder, key in holders:
        holder[key] = ""
        holder.pop(_PLACE, None)
    return encode_json(body) if holders else data


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
