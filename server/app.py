"""What the server adds to the shared HTTP API: enrolment of devices, their link, and other servers' answers.

`POST /v1/devices/enrol` needs no API key: a device proves a one-time code, has its public key enrolled, and is told the
server's. The code itself is never sent; see `paceline.wire.identity`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from paceline.api.app import include
from paceline.api.http.hop import Hops
from paceline.api.http.routing import OpenRoute
from paceline.api.openapi import REFUSALS
from paceline.api.responses.endpoint import LoggedAnswer
from paceline.errors import RequestError
from paceline.runtime.identity import PrivateKey
from paceline.wire.identity import ALPHABET, GROUP_LETTERS, EnrolmentRequest
from paceline.wire.messages import KEY_BYTES, NONCE_BYTES, SIGNATURE_BYTES, VERSION

from . import links
from .devices import Registry
from .links import Links

if TYPE_CHECKING:
    from paceline.fleet import Fleet

ENROL = "/v1/devices/enrol"


def _of_length(size: int) -> AfterValidator:
    def check(text: str) -> str:
        try:
            found = len(base64.b64decode(text, validate=True))
        except binascii.Error:
            found = -1
        if found != size:
            raise ValueError(f"must be {size} bytes in base64")
        return text

    return AfterValidator(check)


PublicKey = Annotated[str, Field(max_length=64), _of_length(KEY_BYTES)]
Nonce = Annotated[str, Field(max_length=64), _of_length(NONCE_BYTES)]
Signature = Annotated[str, Field(max_length=128), _of_length(SIGNATURE_BYTES)]


class Enrolment(BaseModel):
    """A device's request. Keys, nonce and signatures are base64; openapi/link.md says what is signed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: int = Field(description="version of the link's protocol")
    code_id: str = Field(pattern=f"^[{ALPHABET}]{{{GROUP_LETTERS}}}$", description="first group of the code")
    key: PublicKey = Field(description="the device's public key, Ed25519")
    nonce: Nonce
    code_signature: Signature = Field(description="by the key derived from the code")
    key_signature: Signature = Field(description="by the device's key")

    @model_validator(mode="before")
    @classmethod
    def _of_this_release(cls, body: object) -> object:
        if isinstance(body, dict) and body.get("version", VERSION) != VERSION:
            raise RequestError(
                "This device's release enrols in another way; install the same Paceline release on both sides.",
                code="version_mismatch",
                param="version",
            )
        return body


class Enrolled(BaseModel):
    object: Literal["device"] = "device"
    device: str = Field(description="the name that the server's owner gave it")
    server_key: str = Field(description="the server's public key, to be pinned once `mac` has been checked")
    mac: str = Field(description="by the MAC key derived from the code")
    signature: str = Field(description="by the server's key")


router = APIRouter(route_class=OpenRoute, responses=REFUSALS, tags=["service"])  # the code authenticates


@router.post(ENROL)
async def enrol(asked: Enrolment, request: Request) -> Enrolled:
    """Enrol the public key of a device that proves a one-time code."""
    enrolment = msgspec.convert(asked.model_dump(exclude={"version"}), EnrolmentRequest)  # bytes from base64
    registry: Registry = request.app.state.registry
    found = await asyncio.to_thread(registry.enrol, enrolment, request.app.state.signer)
    return Enrolled(**msgspec.to_builtins(found))


def add_devices(app: FastAPI, registry: Registry, live: Links) -> FastAPI:
    """The application, made by `create_app`, with the server's own routes."""
    app.state.registry, app.state.signer = registry, live.key
    include(app, router)
    app.add_api_websocket_route(links.PATH, live.serve)
    return app


def add_hops(app: FastAPI, fleet: Fleet, key: PrivateKey, has: Callable[[str | None], bool]) -> None:
    """Have it pass on what other servers of its fleet are to answer. key: common to all. has: see `Hops`."""

    def follow(response: str, after: int) -> AsyncIterable[Any]:
        return LoggedAnswer(app.state.responses.log, response, after=after).body_iterator

    app.state.admission.hops = hops = Hops(fleet, key.seed, has, follow)
    app.state.closers.append(hops.close)
