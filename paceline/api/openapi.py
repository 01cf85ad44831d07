"""FastAPI's OpenAPI document, with answers in OpenAI's shapes, as the types of the official client have them.

Routes name those types as text; their schemas, without their texts, are in a file of the package, which
`lab.client_shapes` writes: the client itself, 30 MB, is not needed here. They allow additional fields, and so ours.
The schema of a stream is that of one event, as in OpenAPI 3.2; its data is `[DONE]` or JSON as `contentSchema` says.
The WebSocket of the link is in `link.md`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
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
OFFICIAL: Final = Path(__file__).with_name("official.json")  # OpenAI's shapes: references to schemas, and these
_NAMED = "named:"  # before the name of a shape, until `describe` puts its schema in
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
    return {
        "4XX": {"model": model, "description": "The request cannot be served as it is.", "headers": _HEADERS},
        "5XX": {"model": model, "description": "The server cannot answer it, perhaps only now.", "headers": _HEADERS},
    }


REFUSALS: Final = refusals(Error)


def keyed_router(
    tag: str, scope: str = "", *, prefix: str = "", route: type[Route] = Route, error: type[BaseModel] = Error
) -> APIRouter:
    """A router of endpoints that need a key with this scope; without one, any key. error: the shape of refusals."""
    doors = [Security(key, scopes=[scope] if scope else [])]
    return APIRouter(prefix=prefix, route_class=route, dependencies=doors, responses=refusals(error), tags=[tag])


def answered(
    shape: str | type[BaseModel], *, stream: str | type[BaseModel] | None = None, lines: bool = False
) -> Responses:
    """`responses` of an endpoint that makes its answer itself. shape: a model, or the name of a type in `openai.types`,
    such as `chat.ChatCompletion` or the lists `SyncPage[Model]` and `SyncCursorPage[FileObject]`. stream: likewise of
    an event, where it streams. lines: it also answers in lines of JSON of that shape."""
    content = {"application/json": _named(shape)}
    if stream is not None:
        encoded = {"contentMediaType": "application/json", "contentSchema": _named(stream)}
        data: Json = {"type": "string", "anyOf": [{"const": "[DONE]"}, encoded]}
        content["text/event-stream"] = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    if lines:
        content["application/x-ndjson"] = _named(shape)
    return {200: {"content": {kind: {"schema": schema} for kind, schema in content.items()}}}


def _named(shape: str | type[BaseModel]) -> Json:
    if isinstance(shape, str):
        return {"$ref": _NAMED + shape}
    _own[shape.__name__] = shape
    return {"$ref": _NAMED + shape.__name__}


def form(model: type[BaseModel]) -> Json:
    """`openapi_extra` of an endpoint that reads a multipart body itself; a field of bytes is a file."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _named(model)}}}}


# ---- the document ---------------------------------------------------------------------------------------------------
router = keyed_router("service")


@router.get(PATH)
async def show_description(request: Request) -> Response:
    """Describe this interface, as OpenAPI 3.1."""
    document = await asyncio.to_thread(request.app.openapi)
    return Response(encode_json(document), media_type="application/json")


def describe(app: FastAPI) -> Json:
    """The document of all routes of the application; made once, unless there are more since."""
    if not app.openapi_schema:
        document = outline(app)
        official = json.loads(OFFICIAL.read_text("utf-8"))
        own, schemas = schemas_of(_own, "validation")
        shapes = official["shapes"] | own
        for each in list(_references(document)):
            each |= shapes[each.pop("$ref").removeprefix(_NAMED)]
        document["paths"] = dict(sorted(document["paths"].items()))
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                operation["operationId"] = "_".join([method, *re.findall(r"\w+", path)])
        components = document["components"]
        components["schemas"] = dict(sorted((components["schemas"] | official["schemas"] | schemas).items()))
        app.openapi_schema = document
    return app.openapi_schema


def outline(app: FastAPI) -> Json:
    return get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)


def official_names(document: Json) -> set[str]:
    return {each["$ref"].removeprefix(_NAMED) for each in _references(document)} - _own.keys()


def _references(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        if isinstance(name := value.get("$ref"), str) and name.startswith(_NAMED):
            yield value
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


class _Generator(GenerateJsonSchema):
    """Schema generator without titles, which would repeat the names of the fields."""

    def field_title_should_be_set(self, schema: Any) -> Literal[False]:  # noqa: ARG002  # pydantic's signature
        return False


def schemas_of(shapes: Json, mode: Literal["validation", "serialization"], prefix: str = "") -> tuple[Json, Json]:
    """A reference or schema for each type, and all schemas that are referred to, with the prefix before their names."""
    adapters: Sequence[Any] = [(name, mode, TypeAdapter[Any](shape)) for name, shape in shapes.items()]
    refs, found = TypeAdapter.json_schemas(
        adapters, ref_template=f"#/components/schemas/{prefix}{{model}}", schema_generator=_Generator
    )
    schemas = {f"{prefix}{name}": schema for name, schema in found.get("$defs", {}).items()}
    return {name: schema for (name, _), schema in refs.items()}, schemas
