"""Validation of JSON bodies: the base class of every request schema, and the first fault as a sentence.

An explicit null means absent, since typed clients send nulls. Knows no endpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.config import JsonDict

from paceline.errors import RequestError

# Names of union branches, which are not part of a field's path.
_BRANCH = re.compile(r"<.*|str|bool|int|float|constrained-str|(list|dict)\[.*\]")


def _nullable(schema: JsonDict) -> None:
    """Allow null for every optional field in a schema of `openapi.json`."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(properties, dict):
        return
    for name, field in properties.items():
        if not isinstance(field, dict) or (isinstance(required, list) and name in required):
            continue
        branches = field.get("anyOf")
        if not isinstance(branches, list) or {"type": "null"} not in branches:
            rest: JsonDict = {key: field.pop(key) for key in ("description", "default") if key in field}
            properties[name] = {"anyOf": [field, {"type": "null"}], **rest}


class Schema(BaseModel):
    """Strict about types (no "1" for 1); ignores unknown fields and nulls."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, frozen=True, json_schema_extra=_nullable
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value


S = TypeVar("S", bound=Schema)


def parse(schema: type[S], body: Mapping[str, object]) -> S:
    """Raises RequestError (400) for the first fault, with the path of the field."""
    try:
        return schema.model_validate(dict(body))
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    """The first fault as a sentence, with the path of the field."""
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ""
    for step in fault["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif not _BRANCH.fullmatch(step):
            param += f".{step}" if param else step
    if fault["type"] == "missing":
        message = f"The field {param} is required."
    elif fault["type"] == "extra_forbidden":
        message = f"Unknown field {param[:128]}."
    else:
        message = f"{param[:128]} cannot be used: {fault['msg'][:1].lower()}{fault['msg'][1:]}."
    return RequestError(message, param=param[:128] or None)
