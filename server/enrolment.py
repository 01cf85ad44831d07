"""`POST /v1/devices/enrol`: exchange a one-time code for a credential. Needs no API key: the code authenticates."""

from __future__ import annotations

import asyncio
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.body import read_body
from paceline.api.http.strict_json import decode_object, encode_json
from paceline.api.routes import Route
from paceline.errors import RequestError

from .devices import Registry

PATH = "/v1/devices/enrol"


class Enrolment(BaseModel):
    """`name` is what the device calls itself. The name its owner gave it holds, and is told in the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    code: str = Field(min_length=1, max_length=64)
    name: str | None = Field(None, max_length=256)


class Enrolled(BaseModel):
    """`credential` is told this once."""

    object: Literal["device"] = "device"
    device: str
    credential: str


class EnrolEndpoint:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path=PATH,
                endpoint=self.__call__,
                summary="Exchange a one-time code for the credential of a device's link.",
                scope=None,
                open=True,  # the code authenticates
                request=Enrolment,
                response=Enrolled,
                refusals=(401,),
            ),
        )

    async def __call__(self, request: Request) -> Response:
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        try:
            asked = Enrolment.model_validate(body)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            param = str(fault["loc"][0])[:64] if fault["loc"] else None
            raise RequestError(f"{param} cannot be used: {fault['msg']}.", param=param) from None
        device, credential = await asyncio.to_thread(self._registry.enrol, asked.code)
        answer = Enrolled(device=device, credential=credential).model_dump()
        return Response(encode_json(answer), media_type="application/json", headers={"cache-control": "no-store"})
