"""Strict JSON.

Decoding accepts an object in UTF-8 without NaN, lone surrogates or nesting that exhausts the stack; anything else is a
400, never a 500. Encoding refuses NaN too, and writes characters instead of escapes.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

from paceline.errors import RequestError

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")  # lone, or one of a pair


def encode_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises RequestError (400) for anything else."""
    try:
        value: object = json.loads(body.decode(), parse_constant=_refuse_constant, parse_float=_finite)
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise RequestError("The request body is not valid UTF-8.") from None
    except UnicodeEncodeError:
        raise RequestError("The request body holds half of a surrogate pair, which is no character.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    except ValueError as error:  # also an integer of too many digits
        raise RequestError(f"The request body could not be parsed as JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("The request body must be a JSON object.")
    return value


def _finite(text: str) -> float:
    """Parse a number. Refuses one that overflows to infinity, which could not be encoded again."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:32]} is too large a number")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
