"""The id of the request that a task is about, for its log lines, its trace and the other side's.

Random, 16 bytes as hexadecimal digits after `req_`: also the trace id of OpenTelemetry.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar
from typing import Final

from paceline.runtime.tracing import PREFIX

request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""Empty outside of a request."""


def new_request_id() -> str:
    return PREFIX + secrets.token_hex(16)
