"""Input texts of OpenAI's older endpoints: one or several, each as a string or as token ids.

Parsed by hand, since a schema of four alternatives can only report that none of them fits.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.errors import RequestError

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Inputs = str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
"""Type of the field in a request schema."""

Input = str | tuple[int, ...]


def read_inputs(value: object, param: str, *, max_inputs: int) -> tuple[Input, ...]:
    """The inputs in order. Raises RequestError (400) that names the element at fault."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong(param, "must be a string, a list of strings, a list of token ids, or a list of such lists")
    if not value:
        raise _wrong(param, "is an empty list")
    if _is_token(value[0]):
        return (_tokens(value, param),)
    if len(value) > max_inputs:
        raise _wrong(param, f"holds {len(value)} texts; at most {max_inputs} at once")
    return tuple(_one(item, f"{param}[{index}]", value[0]) for index, item in enumerate(value))


def _one(item: object, where: str, first: object) -> Input:
    if isinstance(item, str) and isinstance(first, str):
        return item
    if isinstance(item, list) and isinstance(first, list):
        return _tokens(item, where)
    kind = "a string" if isinstance(first, str) else "a list of token ids"
    raise _wrong(where, f"must be {kind}" + (", like the first" if item is not first else ""))


def _tokens(value: list[object], where: str) -> tuple[int, ...]:
    if not value:
        raise _wrong(where, "is an empty list")
    for index, token in enumerate(value):
        if not _is_token(token):
            raise _wrong(f"{where}[{index}]", "must be a token id, a whole number from 0 on")
    return tuple(token for token in value if isinstance(token, int))


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _wrong(where: str, fault: str) -> RequestError:
    return RequestError(f"{where} {fault}.", param=where)
