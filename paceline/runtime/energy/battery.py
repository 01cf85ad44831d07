"""Power of a machine that runs on its battery, from Linux's power supply class.

Measured: everything, the screen too. Nothing while it charges or the mains feed it. Batteries show a new value every
few seconds. Source: https://www.kernel.org/doc/html/latest/power/power_supply_class.html
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.core.energy import MeterUnreadable

POWER_SUPPLY: Final = Path("/sys/class/power_supply")
LOOK_S: Final = 1.0  # reading one may take milliseconds
_MICRO: Final = 1e-6
_JOULES: Final = 3600.0 * _MICRO  # in a microwatt-hour


class Battery:
    """All batteries together. Raises MeterUnreadable where there are none, or they tell neither power nor energy."""

    def __init__(self, clock: Callable[[], float], folder: Path = POWER_SUPPLY) -> None:
        """clock: s, any origin."""
        self._clock = clock
        self._batteries = [each for each in sorted(folder.glob("*")) if _is_of_machine(each)]
        if not self._batteries:
            raise MeterUnreadable("this machine has no battery")
        if not all(_tells(each) for each in self._batteries):
            raise MeterUnreadable("its battery tells neither power_now nor energy_now")
        self._looked: float | None = None
        self._shown: float | MeterUnreadable = MeterUnreadable("not looked yet")
        self._energy: tuple[float, float] | None = None  # when it last changed, and what it was then, J
        self.description = "battery, " + ", ".join(each.name for each in self._batteries)

    def watts(self) -> float:
        """Power now, as of the last second. Raises MeterUnreadable."""
        now = self._clock()
        if self._looked is None or now - self._looked >= LOOK_S:
            self._looked = now
            try:
                self._shown = self._look(now)
            except MeterUnreadable as error:
                self._shown = error
        if isinstance(self._shown, MeterUnreadable):
            raise self._shown
        return self._shown

    def _look(self, now: float) -> float:
        states = {_word(each, "status") for each in self._batteries}
        if "Charging" in states or "Discharging" not in states:
            self._energy = None
            raise MeterUnreadable("the machine does not run on its battery")
        powers = [_power(each) for each in self._batteries]
        if None not in powers:
            return sum(power for power in powers if power is not None)
        return self._slope(now, sum(_number(each, "energy_now") or 0.0 for each in self._batteries) * _JOULES)

    def _slope(self, now: float, left: float) -> float:
        """Mean power between the last two changes of the energy left."""
        last = self._energy
        if last is None or left > last[1]:
            self._energy = now, left
        elif left < last[1] and now > last[0]:
            self._energy = now, left
            return (last[1] - left) / (now - last[0])
        elif isinstance(self._shown, float):
            return self._shown  # it has not changed since
        raise MeterUnreadable("its battery has not shown a change yet")


def _is_of_machine(battery: Path) -> bool:
    """Those of mice and telephones have the scope Device."""
    return _word(battery, "type") == "Battery" and _word(battery, "scope") != "Device"


def _tells(battery: Path) -> bool:
    return _power(battery) is not None or _number(battery, "energy_now") is not None


def _power(battery: Path) -> float | None:
    """W; some drivers show it as a negative number."""
    power = _number(battery, "power_now")
    if power is not None:
        return abs(power) * _MICRO
    current, voltage = _number(battery, "current_now"), _number(battery, "voltage_now")
    return None if current is None or voltage is None else abs(current * _MICRO) * voltage * _MICRO


def _number(folder: Path, name: str) -> float | None:
    try:
        return float(int((folder / name).read_text("ascii")))
    except (OSError, ValueError):
        return None


def _word(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text("ascii").strip()
    except (OSError, ValueError):
        return ""
