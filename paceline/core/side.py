"""The two sides of a request, and zones: absolute names, so that both machines mean the same."""

from __future__ import annotations

from typing import Literal

Side = Literal["cloud", "device"]
SIDES: tuple[Side, Side] = ("cloud", "device")


def other(side: Side) -> Side:
    return "device" if side == "cloud" else "cloud"


# Zones: where documents, models and processing units may be.


Zone = Literal["device", "edge", "cloud"]  # the device, its owner's edge, the cloud
ZONES: tuple[Zone, ...] = ("device", "edge", "cloud")
