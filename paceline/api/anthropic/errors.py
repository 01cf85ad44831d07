"""Anthropic's error envelope. Source: anthropic-sdk-python 2.13 and docs.anthropic.com, "Errors"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel

from paceline.api.http.errors import ErrorShape, Failure
from paceline.api.observation.request_id import request_id

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TOO_LONG = "prompt is too long: "  # by these words agents know that they must shorten their history


class ErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """Every answer of `/v1/messages` that reports an error."""

    type: Literal["error"]
    error: ErrorDetail
    request_id: str


def envelope(failure: Failure) -> Mapping[str, object]:
    kind = _TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    message = (_TOO_LONG if failure.code == "context_length_exceeded" else "") + failure.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id.get()}


SHAPE = ErrorShape("/v1/messages", AnthropicError, envelope, id_header=b"request-id")
