"""Ollama's error envelope."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from paceline.api.http.errors import ErrorShape, Failure


class OllamaError(BaseModel):
    """Every answer below `/api` that reports an error."""

    error: str


def envelope(failure: Failure) -> Mapping[str, object]:
    return {"error": failure.message}


SHAPE = ErrorShape("/api", OllamaError, envelope)
