"""`openapi.json`: the table of routes as an OpenAPI 3.1 document, with every route of the application and no other.

Request bodies come from the pydantic models of the routes. Answers in OpenAI's shapes come from the types of the
official client, without its texts; they allow additional fields, and so ours. The schema of a stream is that of one
event, as in OpenAPI 3.2; its data is `[DONE]` or JSON as `contentSchema` says. The WebSocket of the link is in
`link.md`. Importing this takes a second, for the official client's types: `description` does so when it is asked.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI
from openai import types as official
from openai.pagination import SyncCursorPage, SyncPage
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from paceline.api.http.errors import ErrorShape
from paceline.api.routes import Route

OFFICIAL = "openai."  # prefix of the official client's shapes, some of whose names are also ours
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")  # Starlette's, with or without a converter
_LIST = re.compile(r"(SyncPage|SyncCursorPage)\[([\w.]+)\]")
_MEANING = {
    400: "The request cannot be read or used; `param` names the field.",
    401: "There is no valid key.",
    403: "The key does not allow this, or, without keys, a page or a name of another machine asks.",
    404: "It is not here.",
    408: "The body did not arrive in time.",
    409: "It is in a state that does not allow this.",
    413: "The body is too large.",
    429: "There is too much to do; ask again after Retry-After seconds.",
    500: "The server made a mistake.",
    503: "It cannot be answered now; ask again after Retry-After seconds.",
}
_HEADERS = {
    "x-request-id": {"description": "Names this answer in the server's log.", "schema": {"type": "string"}},
    "openai-processing-ms": {"description": "ms until the answer began.", "schema": {"type": "string"}},
    "Retry-After": {"description": "s", "schema": {"type": "string"}},
}

Json = dict[str, Any]
Described = tuple[type[BaseModel] | str, JsonSchemaMode]


class ErrorBody(BaseModel):
    """Description of an error. All four fields are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that reports an error."""

    error: ErrorBody


def describe(app: FastAPI) -> Json:
    """The document of all routes that `create_app` and the program have registered."""
    routes: Sequence[Route] = [route for route in app.state.routes if route.described]
    refs, schemas = _schemas(routes)
    paths: dict[str, Json] = {}
    for route in sorted(routes, key=lambda route: (route.path, route.method)):
        paths.setdefault(plain_path(route.path), {})[route.method.lower()] = _operation(route, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": app.title,
            "version": app.version,
            "description": "OpenAI's interface, served by a device and a cloud that write each answer together. "
            "What is ours stands in the object `paceline`. Unknown fields are ignored, and null means absent. "
            "Without any key at the server, none is needed.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": _HEADERS,
            "responses": _refusal_shapes(routes, refs),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def plain_path(path: str) -> str:
    """A path as OpenAPI writes it: without Starlette's converters."""
    return _PARAMETER.sub(r"{\1}", path)


def type_of(shape: type[BaseModel] | str) -> Any:
    """The type that a route's shape names: a model, or a type of the official client."""
    if not isinstance(shape, str):
        return shape
    found = _LIST.fullmatch(shape)
    if found:
        pages: dict[str, Any] = {"SyncPage": SyncPage, "SyncCursorPage": SyncCursorPage}
        return pages[found[1]][type_of(found[2])]
    module, _, name = shape.rpartition(".")
    return getattr(importlib.import_module(f"{official.__name__}.{module}") if module else official, name)


# ---- one operation --------------------------------------------------------------------------------------------------
def _operation(route: Route, refs: Mapping[Described, Json]) -> Json:
    operation: Json = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", plain_path(route.path))]),
        "summary": route.summary,
        "tags": [route.scope or "service"],
        "security": []
        if route.open
        else [{scheme: [route.scope] if route.scope else []} for scheme in ("bearer", "key")],
        "responses": _responses(route, refs),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += _query(route.query)
    if parameters:
        operation["parameters"] = parameters
    bodies = (("application/json", route.request), ("multipart/form-data", route.form))
    content = {kind: {"schema": refs[model, "validation"]} for kind, model in bodies if model is not None}
    if content:
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query(model: type[BaseModel] | None) -> list[Json]:
    if model is None:
        return []
    schema = model.model_json_schema()
    assert "$defs" not in schema, "a query is flat"
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(each)}
        for name, each in schema["properties"].items()
    ]


def _without_null(schema: Json) -> Json:
    """The schema of a query parameter, which cannot be null."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind.get("type") != "null"]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "title", "default")}
    return {**rest, **kinds[0]} if len(kinds) == 1 else {**rest, **({"anyOf": kinds} if kinds else {})}


def _responses(route: Route, refs: Mapping[Described, Json]) -> Json:
    schema = {"schema": refs[route.response, "serialization"]} if route.response else {}
    content: Json = {route.media_type: schema}
    if route.stream is not None:
        content[route.stream_type] = {"schema": _streamed(route, refs[route.stream, "serialization"])}
    answers: Json = {"200": {"description": "As asked.", "headers": _headers(200), "content": content}}
    return answers | {
        str(status): {"$ref": f"#/components/responses/{_refusal_name(status, route.errors)}"}
        for status in sorted(_refusals(route))
    }


def _streamed(route: Route, schema: Json) -> Json:
    """The schema of one event; of one line, where the stream is of lines."""
    if route.stream_type != "text/event-stream":
        return schema
    encoded = {"contentMediaType": "application/json", "contentSchema": schema}
    data: Json = {"type": "string", "anyOf": [{"const": "[DONE]"}, encoded]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _refusal_shapes(routes: Sequence[Route], refs: Mapping[Described, Json]) -> Json:
    """Each status in OpenAI's shape, and those of routes that have another in theirs."""
    shapes: Json = {_refusal_name(status, None): _refusal(status, Error, refs) for status in _MEANING}
    for route in routes:
        if route.errors is not None:
            for status in _refusals(route):
                shapes[_refusal_name(status, route.errors)] = _refusal(status, route.errors.model, refs)
    return dict(sorted(shapes.items()))


def _refusal_name(status: int, errors: ErrorShape | None) -> str:
    return str(status) if errors is None else f"{errors.model.__name__}{status}"


def _refusal(status: int, model: type[BaseModel], refs: Mapping[Described, Json]) -> Json:
    content = {"application/json": {"schema": refs[model, "serialization"]}}
    return {"description": _MEANING[status], "headers": _headers(status), "content": content}


def _headers(status: int) -> Json:
    names = [name for name in _HEADERS if name != "Retry-After" or status in (429, 503)]
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _refusals(route: Route) -> set[int]:
    statuses = {500, *route.refusals}
    statuses |= {403} if route.open else {401, 403}  # 403: also for a foreign origin or host without keys
    if route.method == "POST":
        statuses |= {400, 408, 413, 429, 503}
    if route.query is not None:
        statuses |= {400}
    if _PARAMETER.search(route.path):
        statuses |= {404}
    return statuses


# ---- shapes ---------------------------------------------------------------------------------------------------------
class _Generator(GenerateJsonSchema):
    """Schema generator without titles, which would repeat the names of the fields."""

    def field_title_should_be_set(self, schema: Any) -> Literal[False]:  # noqa: ARG002  # pydantic's signature
        return False


def _schemas(routes: Sequence[Route]) -> tuple[dict[Described, Json], Json]:
    """A reference or schema for each shape and mode, and all schemas that are referred to."""
    own: dict[Described, None] = {(Error, "serialization"): None}
    own |= {(route.errors.model, "serialization"): None for route in routes if route.errors is not None}
    theirs: dict[Described, None] = {}
    for route in routes:
        own |= {(model, "validation"): None for model in (route.request, route.form) if model is not None}
        for shape in (route.response, route.stream):
            if shape is not None:
                (theirs if isinstance(shape, str) else own)[shape, "serialization"] = None
    refs, schemas = _generate(own, "{model}")
    more, official_schemas = _generate(theirs, f"{OFFICIAL}{{model}}")
    return refs | more, schemas | {f"{OFFICIAL}{name}": _bare(each) for name, each in official_schemas.items()}


def _generate(shapes: Iterable[Described], name: str) -> tuple[dict[Described, Json], Json]:
    adapters = [(shape, mode, TypeAdapter[Any](type_of(shape))) for shape, mode in shapes]
    if not adapters:
        return {}, {}
    refs, found = TypeAdapter.json_schemas(
        adapters, ref_template=f"#/components/schemas/{name}", schema_generator=_Generator
    )
    return refs, dict(sorted(found.get("$defs", {}).items()))


def _bare(schema: Json) -> Json:
    """A schema without descriptions and titles."""
    return {
        key: {name: _bare(each) for name, each in value.items()} if key == "properties" else _bared(value)
        for key, value in schema.items()
        if key not in ("description", "title")
    }


def _bared(value: Any) -> Any:
    if isinstance(value, dict):
        return _bare(value)
    return [_bared(each) for each in value] if isinstance(value, list) else value
