"""Passages in the last event of a response: stored as references, and filled in when the event is read.

The log keeps no text of documents, so that removing a document, by whatever program, removes it from stored responses
too. A passage of this side is stored as the id of its chunk; one of the other side, whose removals are not known here,
is not stored. Both are "" once they cannot be found. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from paceline.api.http.strict_json import encode_json
from paceline.runtime.service import GenerationResult

_CHUNK = "chunk"  # key of a reference

Texts = Callable[[Collection[int]], Mapping[int, str]]  # chunk ids → texts of those that exist


def stored_form(last: Mapping[str, Any], done: GenerationResult) -> bytes | None:
    """The JSON of the last event as it is stored; None if it holds no passage. `last`: its body, made from `done`."""
    if not any(_places(last)):
        return None
    body = json.loads(encode_json(last))
    cited = [citation.chunk_id for citation in done.citations]
    found = [citation.chunk_id for citation in done.found if citation.file_id]
    for chunk_ids, places in ((cited, _cited(body)), (found, _results(body))):
        for chunk_id, (holder, key) in zip(chunk_ids if places else (), places, strict=True):
            holder[key] = "" if chunk_id is None else {_CHUNK: chunk_id}
            holder.pop("place", None)  # it may be a heading, which is text of the document
    return encode_json(body)


def filled(data: bytes, texts: Texts) -> bytes:
    """The JSON of a stored last event with its passages."""
    body = json.loads(data)
    references = [(holder, key) for holder, key in _places(body) if isinstance(holder[key], dict)]
    if not references:
        return data
    known = texts({holder[key][_CHUNK] for holder, key in references})
    for holder, key in references:
        holder[key] = known.get(holder[key][_CHUNK], "")
    return encode_json(body)


def without_passages(data: bytes) -> bytes:
    """The JSON of a last event that was stored with its passages, without them."""
    body = json.loads(data)
    places = list(_places(body))
    for holder, key in places:
        holder[key] = ""
        holder.pop("place", None)
    return encode_json(body) if places else data


def _places(body: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects that hold passages, each with the key."""
    yield from _cited(body)
    yield from _results(body)


def _cited(body: Mapping[str, Any]) -> Sequence[tuple[dict[str, Any], str]]:
    report = body["response"].get("paceline") or {}
    return [(citation, "passage") for citation in report.get("citations", ())]


def _results(body: Mapping[str, Any]) -> Sequence[tuple[dict[str, Any], str]]:
    searches = [item for item in body["response"]["output"] if item["type"] == "file_search_call"]
    return [(result, "text") for search in searches for result in search.get("results") or ()]
