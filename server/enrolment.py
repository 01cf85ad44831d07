"""`POST /v1/devices/enrol`: a device that proves a one-time code has its public key enrolled, and is told the server's.

Needs no API key: the code authenticates. The code itself is never sent; see `paceline.wire.identity`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from paceline.api.http.body import read_body
from paceline.api.http.errors import decode_object, encode_json
from paceline.api.routes import Route
from paceline.errors import RequestError
from paceline.wire.effects import Signer
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


class Enrolled(BaseModel):
    object: Literal["device"] = "device"
    device: str = Field(description="the name that the server's owner gave it")
    server_key: str = Field(description="the server's public key, to be pinned once `mac` has been checked")
    mac: str = Field(description="by the MAC key derived from the code")
    signature: str = Field(description="by the server's key")


class EnrolEndpoint:
    def __init__(self, registry: Registry, key: Signer) -> None:
        self._registry = registry
        self._key = key

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(
                method="POST",
                path=PATH,
                endpoint=self.__call__,
                summary="Enrol the public key of a device that proves a one-time code.",
                scope=None,
                open=True,  # the code authenticates
                request=Enrolment,
                response=Enrolled,
                refusals=(401,),
            ),
        )

    async def __call__(self, request: Request) -> Response:
        body = decode_object(await read_body(request.receive, request.headers.get("content-length")))
        if body.get("version", VERSION) != VERSION:
            raise RequestError(
                "This device's release enrols in another way; install the same Paceline release on both sides.",
                code="version_mismatch",
                param="version",
            )
        try:
            asked = Enrolment.model_validate(body)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            param = str(fault["loc"][0])[:64] if fault["loc"] else None
            raise RequestError(f"{param} cannot be used: {fault['msg']}.", param=param) from None
        enrolment = EnrolmentRequest(
            asked.code_id,
            base64.b64decode(asked.key),
            base64.b64decode(asked.nonce),
            base64.b64decode(asked.code_signature),
            base64.b64decode(asked.key_signature),
        )
        found = await asyncio.to_thread(self._registry.enrol, enrolment, self._key)
        answer = Enrolled(
            device=found.device,
            server_key=base64.b64encode(found.server_key).decode(),
            mac=base64.b64encode(found.mac).decode(),
            signature=base64.b64encode(found.signature).decode(),
        ).model_dump()
        return Response(encode_json(answer), media_type="application/json", headers={"cache-control": "no-store"})
