"""`POST /v1/devices/enrol`: a device that proves a one-time code has its public key enrolled, and is told the server's.

Needs no API key: the code authenticates. The code itself is never sent; see `paceline.wire.identity`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from paceline.api.http.routing import OpenRoute
from paceline.api.openapi import REFUSALS
from paceline.errors import RequestError
from paceline.wire.identity import ALPHABET, GROUP_LETTERS, EnrolmentRequest
from paceline.wire.messages import KEY_BYTES, NONCE_BYTES, SIGNATURE_BYTES, VERSION

from .devices import Registry

PATH = "/v1/devices/enrol"


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


@router.post(PATH)
async def enrol(asked: Enrolment, request: Request) -> Enrolled:
    """Enrol the public key of a device that proves a one-time code."""
    enrolment = msgspec.convert(asked.model_dump(exclude={"version"}), EnrolmentRequest)  # bytes from base64
    registry: Registry = request.app.state.registry
    found = await asyncio.to_thread(registry.enrol, enrolment, request.app.state.signer)
    return Enrolled(**msgspec.to_builtins(found))
