"""FastAPI's OpenAPI document, with answers in OpenAI's shapes from the types of the official client.

Those types take a second to import, which no start waits for: routes name them as text, and `describe` puts their
schemas in, without their texts. They allow additional fields, and so ours. The schema of a stream is that of one event,
as in OpenAPI 3.2; its data is `[DONE]` or JSON as `contentSchema` says. The WebSocket of the link is in `link.md`.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Security
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.body import encode_json
from paceline.api.http.routing import Route, key

Json = dict[str, Any]
Responses = dict[int | str, Json]

PATH = "/openapi.json"
ABOUT = (
    "OpenAI's interface, served by a device and a cloud that write each answer together. What is ours stands in the "
    "object `paceline`. Unknown fields are ignored, and null means absent. Without any key at the server, none is "
    "needed."
)
_OFFICIAL = "openai."  # prefix of the official client's shapes, some of whose names are also ours
_NAMED = "named:"  # before the name of a shape, until `describe` puts its schema in
_LIST = re.compile(r"(SyncPage|SyncCursorPage)\[([\w.]+)\]")
_own: dict[str, type[BaseModel]] = {}  # models of streams and of forms, by name

_SAID = {"schema": {"type": "string"}}
_HEADERS = {
    "x-request-id": {"description": "Names this answer in the server's log."} | _SAID,
    "Retry-After": {"description": "s, where asking again may help (429, 503)."} | _SAID,
}


class ErrorBody(BaseModel):
    """Description of an error. All four fields are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that reports an error."""

    error: ErrorBody


def refusals(model: type[BaseModel]) -> Responses:
    """`responses` of a router whose errors have this shape."""
    return {
        "4XX": {"model": model, "description": "The request cannot be served as it is.", "headers": _HEADERS},
        "5XX": {"model": model, "description": "The server cannot answer it, perhaps only now.", "headers": _HEADERS},
    }


REFUSALS: Final = refusals(Error)


def official(shape: str, *, stream: str | type[BaseModel] = "") -> Responses:
    """`responses` of an endpoint that answers in the shape of a type in `openai.types`, such as `chat.ChatCompletion`
    or the lists `SyncPage[Model]` and `SyncCursorPage[FileObject]`. `stream`: shape of an event, where it streams."""
    return answered(shape) if not stream else answered(shape, {"text/event-stream": _event(stream)})


def answered(shape: str | type[BaseModel], streams: Json | None = None) -> Responses:
    """`responses` of an endpoint that makes its answer itself. `streams`: schemas of others by media type."""
    content = {"application/json": _named(shape)} | (streams or {})
    return {200: {"content": {kind: {"schema": schema} for kind, schema in content.items()}}}


def _named(shape: str | type[BaseModel]) -> Json:
    if isinstance(shape, str):
        return {"$ref": _NAMED + shape}
    _own[shape.__name__] = shape
    return {"$ref": _NAMED + shape.__name__}


def lines(shape: type[BaseModel]) -> Json:
    """The media type and schema of a stream of lines, for `answered`."""
    return {"application/x-ndjson": _named(shape)}


def events(shape: type[BaseModel]) -> Json:
    """The media type and schema of a stream of events, for `answered`."""
    return {"text/event-stream": _event(shape)}


def _event(shape: str | type[BaseModel]) -> Json:
    encoded = {"contentMediaType": "application/json", "contentSchema": _named(shape)}
    data: Json = {"type": "string", "anyOf": [{"const": "[DONE]"}, encoded]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def form(model: type[BaseModel]) -> Json:
    """`openapi_extra` of an endpoint that reads a multipart body itself; a field of bytes is a file."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _named(model)}}}}


# ---- the document ---------------------------------------------------------------------------------------------------
router = APIRouter(route_class=Route, dependencies=[Security(key)], responses=REFUSALS, tags=["service"])


@router.get(PATH)
async def show_description(request: Request) -> Response:
    """Describe this interface, as OpenAPI 3.1."""
    document = await asyncio.to_thread(request.app.openapi)
    return Response(encode_json(document), media_type="application/json")


def describe(app: FastAPI) -> Json:
    """The document of all routes of the application; made once, unless there are more since."""
    if not app.openapi_schema:
        document = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
        names = sorted({each["$ref"].removeprefix(_NAMED) for each in _references(document)})
        schemas = document["components"]["schemas"]
        for mode, prefix, shapes in (
            ("validation", "", {name: _own[name] for name in names if name in _own}),
            ("serialization", _OFFICIAL, {name: _official_type(name) for name in names if name not in _own}),
        ):
            refs, found = _schemas(shapes, mode, prefix)
            schemas |= {f"{prefix}{name}": _bare(each) if prefix else each for name, each in found.items()}
            for each in list(_references(document)):
                if each["$ref"].removeprefix(_NAMED) in shapes:
                    each |= refs[each.pop("$ref").removeprefix(_NAMED)]
        document["paths"] = dict(sorted(document["paths"].items()))
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                operation["operationId"] = "_".join([method, *re.findall(r"\w+", path)])
        document["components"]["schemas"] = dict(sorted(schemas.items()))
        app.openapi_schema = document
    return app.openapi_schema


def _references(value: Any) -> Iterator[Json]:
    """Every reference to a named shape."""
    if isinstance(value, dict):
        if isinstance(name := value.get("$ref"), str) and name.startswith(_NAMED):
            yield value
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def _official_type(shape: str) -> Any:
    """The type of the official client; any, where that is not installed."""
    module, _, name = f"types.{shape}".rpartition(".")
    try:
        if found := _LIST.fullmatch(shape):
            return getattr(importlib.import_module("openai.pagination"), found[1])[_official_type(found[2])]
        return getattr(importlib.import_module(f"openai.{module}"), name)
    except ModuleNotFoundError:
        return Any


class _Generator(GenerateJsonSchema):
    """Schema generator without titles, which would repeat the names of the fields."""

    def field_title_should_be_set(self, schema: Any) -> Literal[False]:  # noqa: ARG002  # pydantic's signature
        return False


def _schemas(shapes: Json, mode: Any, prefix: str) -> tuple[Json, Json]:
    """A reference or schema for each shape, and all schemas that are referred to."""
    if not shapes:
        return {}, {}
    adapters: Sequence[Any] = [(name, mode, TypeAdapter[Any](shape)) for name, shape in shapes.items()]
    refs, found = TypeAdapter.json_schemas(
        adapters, ref_template=f"#/components/schemas/{prefix}{{model}}", schema_generator=_Generator
    )
    return {name: schema for (name, _), schema in refs.items()}, found.get("$defs", {})


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
