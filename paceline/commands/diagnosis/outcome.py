"""The outcome of a check.

`ok`: as it should be. `warn`: works, with the drawback that the sentence names. `fail`: something will not work, and
the sentence says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
Found = tuple[Status, str]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    text: str
