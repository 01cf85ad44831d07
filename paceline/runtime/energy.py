"""Energy of this machine: the meters it offers, the one that is used, and the debt of the budget, kept in the state
directory.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.core.energy import (
    CounterMeter,
    MeterReading,
    MeterUnreadable,
    MeterWithSubstitute,
    PowerMeter,
    StepMeter,
    WorkloadMeter,
)
from paceline.core.offloading import EnergyDebt, EnergyQueue, ModelShape, Unit
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import KeptJson
from paceline.settings_tables import EnergySettings
from paceline.wire.messages import Options

POWER_SUPPLY: Final = Path("/sys/class/power_supply")
LOOK_S: Final = 1.0  # reading one may take milliseconds
_MICRO: Final = 1e-6


class Battery:
    """Power of a machine that runs on its batteries, from Linux's power supply class: everything, the screen too.

    They show a new value every few seconds. Raises MeterUnreadable where there are none, or one tells no power. Source:
    https://www.kernel.org/doc/html/latest/power/power_supply_class.html
    """

    def __init__(self) -> None:
        found = [each for each in sorted(POWER_SUPPLY.glob("*")) if _word(each, "type") == "Battery"]
        self._batteries = [each for each in found if _word(each, "scope") != "Device"]  # as those of mice and phones
        if not self._batteries:
            raise MeterUnreadable("this machine has no battery")
        if any(_power(each) is None for each in self._batteries):
            raise MeterUnreadable("its battery tells neither power_now nor current_now")
        self._looked = -math.inf
        self._shown: float | None = None  # W; None: not while it charges or the mains feed it
        self.description = "battery, " + ", ".join(each.name for each in self._batteries)

    def watts(self) -> float:
        """Power now, as of the last second. Raises MeterUnreadable."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            states = {_word(each, "status") for each in self._batteries}
            runs = "Discharging" in states and "Charging" not in states
            self._looked, self._shown = now, sum(_power(each) or 0.0 for each in self._batteries) if runs else None
        if self._shown is None:
            raise MeterUnreadable("the machine does not run on its battery")
        return self._shown


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


_MILLI: Final = 1e-3
_REFRESHED_S: Final = 0.1


class Nvml:
    """Energy of one of NVIDIA's GPUs, from its own counter (Volta and later): the whole board, idle power and other
    programs' work included. It is refreshed some ten times a second: right over many steps, not for one. So it is not
    asked more often either, since an answer of the driver may take longer than a step.

    Raises MeterUnreadable without the library, its driver, that GPU or its counter, which a part of one (MIG) has not.
    """

    def __init__(self, uuid: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """uuid: of the GPU, as CUDA tells it, since the two number GPUs differently; None: the first one."""
        self._clock = clock
        self._last: Sequence[MeterReading] = ()
        self._asked = -math.inf
        try:
            self._nvml: Any = importlib.import_module("pynvml")  # which ships no types and need not be installed
        except ImportError:
            raise MeterUnreadable("the library nvidia-ml-py is not installed: `pip install 'paceline[nvml]'`") from None
        try:
            self._nvml.nvmlInit()
            name = None if uuid is None else uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
            self._gpu = by_index(0) if name is None else by_uuid(name)
            self.description = f"NVML, {self._nvml.nvmlDeviceGetName(self._gpu)}"
        except self._nvml.NVMLError as error:
            raise MeterUnreadable(f"NVML cannot be used: {error}") from None
        self.read()

    def read(self) -> Sequence[MeterReading]:
        """Joules since the driver was loaded. Raises MeterUnreadable."""
        if (now := self._clock()) - self._asked >= _REFRESHED_S:
            try:
                joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) * _MILLI
            except self._nvml.NVMLError as error:
                raise MeterUnreadable(f"NVML shows no energy: {error}") from None
            self._last, self._asked = [MeterReading(joules)], now
        return self._last


POWERCAP: Final = Path("/sys/class/powercap")
_PACKAGE: Final = re.compile(r"intel-rapl:\d+")
_PART: Final = re.compile(r"intel-rapl:\d+:\d+")


@dataclass(frozen=True, slots=True)
class Zone:
    name: str  # as the kernel calls it: "package-0", "dram"
    counter: Path
    span: float  # J, after which it begins anew

    def read(self) -> MeterReading:
        """Raises MeterUnreadable."""
        return MeterReading(_counter(self.counter) * _MICRO, self.span)


class Rapl:
    """Energy of processors, from the counters of Linux's powercap (Intel's and AMD's) that do not overlap: packages,
    and memory beside them; not disks, radio, screen, fans or a GPU.

    Raises MeterUnreadable where there are none, or where they cannot be read. Zones:
    https://www.kernel.org/doc/html/latest/power/powercap/powercap.html
    """

    def __init__(self) -> None:
        try:
            names = sorted(each.name for each in POWERCAP.iterdir())
        except OSError:
            raise MeterUnreadable("this machine has no RAPL counters") from None
        found = [_zone(POWERCAP / name) for name in names if _PACKAGE.fullmatch(name)]
        parts = [_zone(POWERCAP / name) for name in names if _PART.fullmatch(name)]
        # `psys` counts the whole platform, packages included; other parts of a package are in it.
        self.zones = [each for each in found if each.name.startswith("package")]
        if not self.zones:
            raise MeterUnreadable("this machine has no RAPL counters")
        self.zones += [each for each in parts if each.name == "dram"]
        self.description = "RAPL, " + ", ".join(each.name for each in self.zones)
        self.read()

    def read(self) -> Sequence[MeterReading]:
        """Raises MeterUnreadable."""
        return [zone.read() for zone in self.zones]


def _zone(folder: Path) -> Zone:
    return Zone(_word(folder, "name"), folder / "energy_uj", _counter(folder / "max_energy_range_uj") * _MICRO)


def _counter(file: Path) -> float:
    try:
        return float(int(file.read_text("ascii")))
    except PermissionError:
        raise MeterUnreadable(
            f"{file} can be read by root alone: let this user's group read it (`chmod g+r`, `chgrp`)"
        ) from None
    except (OSError, ValueError) as error:
        raise MeterUnreadable(f"{file} cannot be read: {error}") from None


_GIGA: Final = 1e9

log = logging.getLogger("paceline.energy")


@dataclass(frozen=True, slots=True)
class ChosenMeter:
    meter: StepMeter | None  # never raises; None: energy is neither measured nor modelled
    text: str  # what it is, and why no better one, a sentence without its full stop


def choose_meter(
    settings: EnergySettings, shape: ModelShape | None, *, gpu: bool = False, gpu_uuid: str | None = None
) -> ChosenMeter:
    """auto: the GPU's counter where the engine runs on one, else the processors', else the battery, else a model.

    shape: of the model; None: not known. gpu_uuid: as CUDA tells it; None: the first one. Raises ConfigError for a
    meter that is named and is not to be had.
    """
    name = settings.meter
    if name == "off":
        return ChosenMeter(None, "off: energy is neither measured nor modelled")
    model, model_text = _modelled(settings, shape)
    if name in ("power", "workload"):
        return ChosenMeter(model, model_text)
    order = (("nvml",) if gpu else ("rapl", "battery")) if name == "auto" else (name,)
    tried: list[str] = []
    for each in order:
        try:
            meter, text = _measuring(each, gpu_uuid)
        except MeterUnreadable as error:
            if name != "auto":
                raise ConfigError(f"energy.meter = {name} cannot be used: {error}. Use auto, or power.") from None
            tried.append(str(error))
            continue

        def failed(why: str, of: str = each) -> None:
            log.warning("energy is not measured by %s for now (%s); %s", of, why, model_text)

        return ChosenMeter(MeterWithSubstitute(meter, model, failed), f"measured: {text}")
    return ChosenMeter(model, f"{model_text}; not measured: {'; '.join(tried)}")


def _measuring(name: str, gpu_uuid: str | None) -> tuple[StepMeter, str]:
    """Raises MeterUnreadable."""
    if name == "rapl":
        rapl = Rapl()
        return CounterMeter("rapl", rapl.read), rapl.description
    if name == "nvml":
        nvml = Nvml(gpu_uuid)
        return CounterMeter("nvml", nvml.read), nvml.description
    battery = Battery()
    return PowerMeter("battery", battery.watts, time.monotonic, measured=True), battery.description


def _modelled(settings: EnergySettings, shape: ModelShape | None) -> tuple[StepMeter, str]:
    """By operations where the speed is stated, else by seconds."""
    name, watts, gflops = settings.meter, settings.compute_watts, settings.compute_gflops
    if name == "workload" and (gflops is None or shape is None):
        what = "compute_gflops is not set" if gflops is None else "the shape of this model is not known"
        raise ConfigError(f"energy.meter = workload cannot be used: {what}. Use power, or auto.")
    if name != "power" and gflops is not None and shape is not None:
        text = f"modelled: {watts:g} W at {gflops:g} GFLOP/s (compute_watts, compute_gflops)"
        return WorkloadMeter("workload", shape, flops_per_s=gflops * _GIGA, watts=watts), text
    text = f"modelled: {watts:g} W while the engine computes (compute_watts)"
    return PowerMeter("power", lambda: watts, time.monotonic, measured=False), text


FILE: Final = "energy.json"
FORMAT: Final = 1
SAVE_S: Final = 30.0


@dataclass(slots=True)
class SideEnergy:
    """Energy of one side of the program: its meter, its radio's power, its budget, and the debt to that budget; by
    default of a side that knows nothing of it. The debt is written every `SAVE_S` in which it has changed, and at the
    end."""

    meter: StepMeter | None = None
    send_w: float = 0.0  # while sending
    budget: tuple[float, Unit] | None = None  # the owner's, of drafting; None: none
    state_dir: Path | None = None  # where the debt is kept over restarts; None: it ends with the program
    debt: EnergyDebt = field(init=False)
    _kept: KeptJson = field(init=False)

    def __post_init__(self) -> None:
        file = None if self.state_dir is None else self.state_dir / FILE
        self._kept = KeptJson(file, "what was spent beyond the energy budget", _told(0.0))
        self.debt = EnergyDebt(self._kept.read(_joules, 0.0))

    def queue(self, options: Options) -> EnergyQueue | None:
        """The device's one debt under the budget of an answer: the request's or the owner's, the stricter of both. Of
        budgets in different units the owner's holds. None: no budget.

        Raises PacelineError for a request's budget where nothing is known of this side's energy.
        """
        asked = options.energy_budget
        own = None if self.budget is None else self._queue(*self.budget)
        if asked is None:
            return own
        if self.meter is None:
            raise PacelineError("it neither measures nor models its energy (energy.meter is off)")
        joules, per = asked
        if own is None:
            return self._queue(joules, per)
        return own.limited(joules, per)

    def _queue(self, joules: float, per: Unit) -> EnergyQueue:
        return EnergyQueue(joules, per=per, weight=None, debt=self.debt)

    def save(self) -> None:
        """Keep the debt for the next start. Writes the disk."""
        self._kept.save(_told(self.debt.joules))


def _told(joules: float) -> dict[str, float]:
    return {"format": FORMAT, "spent_beyond_budget_j": joules}


def _joules(found: dict[str, Any]) -> float:
    joules = float(found["spent_beyond_budget_j"])
    if found["format"] != FORMAT or not 0.0 <= joules < math.inf:
        raise ValueError("another format, or no amount of energy")
    return joules
