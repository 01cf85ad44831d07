"""The outcome of a check.

`ok`: as it should be. `warn`: works, with the drawback that the sentence names. `fail`: something will not work, and
the sentence says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.settings import NodeSettings

Status = Literal["ok", "warn", "fail"]
Found = tuple[Status, str]
NodeChecks = dict[str, Callable[[NodeSettings], Callable[[], Found] | None]]
"""By name: a check of the settings of one side; None for settings that it is not about."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    text: str
