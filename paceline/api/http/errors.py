"""Errors as HTTP: OpenAI's error envelope with all four keys, unless the route speaks another API's.

Maps an exception to its status and, where a retry may succeed, to Retry-After. An unexpected exception becomes a 500
whose text reveals no internals.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel
from starlette.responses import Response

from paceline.api.http.absent import hint_of
from paceline.api.http.strict_json import encode_json
from paceline.errors import EngineError, LinkError, PacelineError, RequestError, StorageError

_log = logging.getLogger("paceline.api")

RETRY_AFTER_S = 1  # a slot or a link is usually free again by then; OpenAI's clients obey it up to 120


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as a client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def envelope(self) -> dict[str, object]:
        """All four keys, `code` a string or null: SDKs in typed languages require it."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def json(self, shape: ErrorShape | None = None) -> bytes:
        """shape: None for OpenAI's."""
        return encode_json(self.envelope() if shape is None else shape.encode(self))

    def response(self, shape: ErrorShape | None = None) -> Response:
        return Response(
            self.json(shape),
            status_code=self.status,
            media_type="application/json",
            headers=dict(self.headers),
        )


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How another API than OpenAI's writes errors, and names a request."""

    prefix: str  # of its paths
    model: type[BaseModel]  # describes it
    encode: Callable[[Failure], Mapping[str, object]]
    id_header: bytes = b""  # for the id of the request, besides `x-request-id`


def failure_of(error: BaseException) -> Failure:
    """The failure that reports an exception to a client."""
    match error:
        case RequestError():
            retry = {"Retry-After": str(error.retry_after or RETRY_AFTER_S)}
            headers = retry if error.status in (429, 503) else {}
            if error.status == 408:  # the rest of the request is not waited for (RFC 9110, 15.5.9)
                headers = {"Connection": "close"}
            if error.code == "answer_too_late":  # official clients would have it computed twice more
                headers["x-should-retry"] = "false"
            return Failure(error.status, str(error), error.type, error.code, error.param, headers)
        case LinkError():
            return Failure(503, str(error), "server_error", "link_lost", headers={"Retry-After": str(RETRY_AFTER_S)})
        case StorageError():
            _log.error("%s", error)  # with the path, which is nobody else's business
            if error.full:
                return Failure(
                    507, "The server's disk is full: what was to be kept is not.", "server_error", "disk_full"
                )
            message = "The server cannot use its files; its log says why."
            return Failure(
                503, message, "server_error", "storage_unusable", headers={"Retry-After": str(RETRY_AFTER_S)}
            )
        case EngineError() | PacelineError():
            return Failure(500, str(error), "server_error")
        case _:
            return Failure(500, "The server made a mistake while answering this request.", "server_error")


def unauthorized(message: str) -> Failure:
    return Failure(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def http_failure(status: int, method: str, path: str, allow: str | None) -> Failure:
    """A fault found by the router: an unknown path, or a method it does not take."""
    if status == 404:
        return Failure(404, f"There is no {path} here.{hint_of(path)}", code="unknown_url")
    if status == 405:
        headers = {"Allow": allow} if allow else {}
        takes = f" It takes {allow}." if allow else ""
        return Failure(405, f"{path} does not take {method}.{takes}", code="method_not_allowed", headers=headers)
    return Failure(status, f"{method} {path} cannot be served.")
