"""Options of a vector store search (attribute filters, ranking), and the selection of stores for a generation.

Shared by `/v1/vector_stores/{id}/search`, the tool `file_search` and `paceline.vector_stores` in a chat. Source:
openai-openapi 2.3.0, VectorStoreSearchRequest, ComparisonFilter, CompoundFilter, RankingOptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import Depends
from pydantic import Discriminator, Field, Tag

from paceline.api.generation.schema import unsupported
from paceline.api.http.auth import Identity
from paceline.api.http.body import Schema
from paceline.api.http.routing import ServiceDep
from paceline.errors import RequestError
from paceline.rag.records import DEFAULT_COLLECTION
from paceline.rag.store.library import Library
from paceline.rag.store.vector_stores import AttributesOf, Comparison, Compound, Filter
from paceline.runtime.service import GenerateRequest, Service

MAX_QUERIES = 8
MAX_QUERY = 4096  # characters
MAX_RESULTS = 50
MAX_COMPARISONS = 100  # in one filter
MAX_FILTER_DEPTH = 8

Key = Annotated[str, Field(min_length=1, max_length=64)]
Value = Annotated[str, Field(max_length=512)] | bool | int | float


class ComparisonFilter(Schema):
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: Key
    value: Value | Annotated[list[Value], Field(max_length=MAX_COMPARISONS)]


class CompoundFilter(Schema):
    type: Literal["and", "or"]
    filters: Annotated[list[FilterField], Field(min_length=1, max_length=MAX_COMPARISONS)]


def _branch(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<compound>" if kind in ("and", "or") else "<comparison>"


FilterField = Annotated[
    Annotated[ComparisonFilter, Tag("<comparison>")] | Annotated[CompoundFilter, Tag("<compound>")],
    Discriminator(_branch),
]


class RankingOptions(Schema):
    """Ranking is always dense and lexical together: every ranker's name means it, and its weights cannot be set."""

    ranker: Literal["none", "auto", "default-2024-08-21", "default-2024-11-15"] = "auto"
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    hybrid_search: object = None


def filter_of(asked: ComparisonFilter | CompoundFilter | None, param: str = "filters") -> Filter | None:
    """Raises RequestError (400) for a filter that is too large, or orders values that have no order."""
    if asked is None:
        return None
    if _size(asked, 1) > MAX_COMPARISONS:
        raise RequestError(
            f"{param} may hold {MAX_COMPARISONS} comparisons, {MAX_FILTER_DEPTH} deep.", code="filter_too_large",
            param=param,
        )  # fmt: skip
    return _converted(asked, param)


def _size(asked: ComparisonFilter | CompoundFilter, depth: int) -> int:
    if depth > MAX_FILTER_DEPTH:
        return MAX_COMPARISONS + 1
    if isinstance(asked, ComparisonFilter):
        return len(asked.value) if isinstance(asked.value, list) else 1
    return sum(_size(part, depth + 1) for part in asked.filters)


def _converted(asked: ComparisonFilter | CompoundFilter, param: str) -> Filter:
    if isinstance(asked, CompoundFilter):
        return Compound(asked.type, tuple(_converted(part, param) for part in asked.filters))
    listed = asked.type in ("in", "nin")
    if listed != isinstance(asked.value, list):
        raise RequestError(f"The filter {asked.type} takes {'a list' if listed else 'one value'}.", param=param)
    if isinstance(asked.value, bool) and asked.type not in ("eq", "ne"):
        raise RequestError("A filter can ask of a boolean only whether it is equal: eq or ne.", param=param)
    return Comparison(asked.type, asked.key, tuple(asked.value) if isinstance(asked.value, list) else asked.value)


def min_score_of(options: RankingOptions | None, param: str = "ranking_options") -> float:
    """Raises RequestError (400) for options that cannot be set."""
    if options is None:
        return 0.0
    if options.hybrid_search is not None:
        name = f"{param}.hybrid_search"
        raise unsupported(name, "It is not supported")
    return options.score_threshold


def library_of(service: Service) -> Library:
    library = service.library
    if library is None:
        raise RequestError("This side keeps no documents.", status=404, code="no_documents")
    return library


async def _library(service: ServiceDep) -> Library:
    return library_of(service)


LibraryDep = Annotated[Library, Depends(_library)]
"""This side's documents. An endpoint that has it answers 404 where there are none."""


async def select_stores(
    requests: Sequence[GenerateRequest],
    service: Service,
    identity: Identity,
    store_ids: Sequence[str] | None,
    condition: Filter | None = None,
) -> tuple[tuple[GenerateRequest, ...], AttributesOf]:
    """Let the requests read the named stores of this side instead of its own collection, which is named `default`, and
    of them the files that meet `condition`. Returns also a function that gives a file's attributes.

    Raises RequestError (404) for a store that is not the key's.
    """
    names = (DEFAULT_COLLECTION,) if store_ids is None else tuple(store_ids)
    if names == (DEFAULT_COLLECTION,) and condition is None:
        return tuple(requests), lambda _store, _file: {}
    library = library_of(service)
    selection, attributes = await asyncio.to_thread(library.stores.selection, identity.key, names, condition)
    return tuple(replace(one, sources=replace(one.sources, selection=selection)) for one in requests), attributes
