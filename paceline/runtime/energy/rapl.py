"""Energy of processors, from the counters of Linux's powercap (RAPL, of Intel and AMD).

Measured: processor packages and, where the machine tells it apart, their memory; not disks, radio, screen, fans or a
GPU. Zones: https://www.kernel.org/doc/html/latest/power/powercap/powercap.html
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.energy import MeterUnreadable, Reading

POWERCAP: Final = Path("/sys/class/powercap")
_PACKAGE: Final = re.compile(r"intel-rapl:\d+")
_PART: Final = re.compile(r"intel-rapl:\d+:\d+")
_MICRO: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Zone:
    name: str  # as the kernel calls it: "package-0", "dram"
    counter: Path
    span: float  # J, after which it begins anew

    def read(self) -> Reading:
        """Raises MeterUnreadable."""
        return Reading(_number(self.counter) * _MICRO, self.span)


class Rapl:
    """The counters that do not overlap: packages, and memory beside them.

    Raises MeterUnreadable where there are none, or where they cannot be read.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        try:
            names = sorted(each.name for each in folder.iterdir())
        except OSError:
            raise MeterUnreadable("this machine has no RAPL counters") from None
        found = [_zone(folder / name) for name in names if _PACKAGE.fullmatch(name)]
        parts = [_zone(folder / name) for name in names if _PART.fullmatch(name)]
        # `psys` counts the whole platform, packages included; other parts of a package are in it.
        self.zones = [each for each in found if each.name.startswith("package")]
        if not self.zones:
            raise MeterUnreadable("this machine has no RAPL counters")
        self.zones += [each for each in parts if each.name == "dram"]
        self.read()

    def read(self) -> Sequence[Reading]:
        """Raises MeterUnreadable."""
        return [zone.read() for zone in self.zones]

    @property
    def description(self) -> str:
        return "RAPL, " + ", ".join(zone.name for zone in self.zones)


def _zone(folder: Path) -> Zone:
    try:
        name = (folder / "name").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    return Zone(name, folder / "energy_uj", _number(folder / "max_energy_range_uj") * _MICRO)


def _number(file: Path) -> float:
    try:
        return float(int(file.read_text("ascii")))
    except PermissionError:
        raise MeterUnreadable(
            f"{file} can be read by root alone: let this user's group read it (`chmod g+r`, `chgrp`)"
        ) from None
    except (OSError, ValueError) as error:
        raise MeterUnreadable(f"{file} cannot be read: {error}") from None
