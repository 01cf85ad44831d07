"""The two sides of one answer. Absolute, never "local" and "remote": a name means the same on both machines."""

from __future__ import annotations

from typing import Literal

Side = Literal["cloud", "device"]
SIDES: tuple[Side, Side] = ("cloud", "device")


def other(side: Side) -> Side:
    return "device" if side == "cloud" else "cloud"
