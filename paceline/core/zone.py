"""Zones: where documents, models and processing units may be."""

from __future__ import annotations

from typing import Literal

Zone = Literal["device", "edge", "cloud"]  # the device, its owner's edge, the cloud
ZONES: tuple[Zone, ...] = ("device", "edge", "cloud")
