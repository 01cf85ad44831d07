"""The meter of a side: what this machine measures, else what a model of it says; found at start-up, or named."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.core.energy import (
    CounterMeter,
    MeterName,
    MeterUnreadable,
    MeterWithSubstitute,
    PowerMeter,
    StepMeter,
    WorkloadMeter,
)
from paceline.core.offloading import ModelShape
from paceline.errors import ConfigError
from paceline.runtime.energy.battery import Battery
from paceline.runtime.energy.nvml import Nvml
from paceline.runtime.energy.rapl import Rapl

_GIGA: Final = 1e9

log = logging.getLogger("paceline.energy")


@dataclass(frozen=True, slots=True)
class Powers:
    """What the owner of a machine states of it."""

    compute_w: float = 12.0  # while the engine runs (GELATO, Table I)
    send_w: float = 0.2  # while sending (23 dBm, likewise)
    gflops: float | None = None  # 10^9 operations a second of the engine; None: not stated


@dataclass(frozen=True, slots=True)
class Machine:
    """Where meters are looked for."""

    gpu: bool = False  # the engine runs on one
    gpu_uuid: str | None = None  # as CUDA tells it; None: the first one
    shape: ModelShape | None = None  # of the model; None: not known
    rapl: Callable[[], Rapl] = Rapl
    nvml: Callable[[str | None], Nvml] = Nvml
    clock: Callable[[], float] = time.monotonic
    battery: Callable[[Callable[[], float]], Battery] = Battery


@dataclass(frozen=True, slots=True)
class ChosenMeter:
    meter: StepMeter | None  # never raises; None: energy is neither measured nor modelled
    text: str  # what it is, and why no better one, a sentence without its full stop
    tried: tuple[str, ...] = field(default=())  # why others are not used


def choose_meter(name: MeterName, powers: Powers, machine: Machine) -> ChosenMeter:
    """auto: the GPU's counter where the engine runs on one, else the processors', else the battery, else a model.

    Raises ConfigError for a meter that is named and is not to be had.
    """
    if name == "off":
        return ChosenMeter(None, "off: energy is neither measured nor modelled")
    model, model_text = _modelled(name, powers, machine)
    if name in ("power", "workload"):
        return ChosenMeter(model, model_text)
    order = (("nvml",) if machine.gpu else ("rapl", "battery")) if name == "auto" else (name,)
    tried: list[str] = []
    for each in order:
        try:
            meter, text = _measuring(each, machine)
        except MeterUnreadable as error:
            if name != "auto":
                raise ConfigError(f"energy_meter = {name} cannot be used: {error}. Use auto, or power.") from None
            tried.append(str(error))
            continue
        return ChosenMeter(MeterWithSubstitute(meter, model, _Failed(each, model_text)), f"measured: {text}")
    return ChosenMeter(model, f"{model_text}; not measured: {'; '.join(tried)}", tuple(tried))


class _Failed:
    """Says that a meter has ceased to work."""

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __call__(self, why: str) -> None:
        log.warning("energy is not measured by %s for now (%s); %s", self._name, why, self._instead)


def _measuring(name: str, machine: Machine) -> tuple[StepMeter, str]:
    """Raises MeterUnreadable."""
    if name == "rapl":
        rapl = machine.rapl()
        return CounterMeter("rapl", rapl.read), rapl.description
    if name == "nvml":
        nvml = machine.nvml(machine.gpu_uuid)
        return CounterMeter("nvml", nvml.read), nvml.description
    battery = machine.battery(machine.clock)
    return PowerMeter("battery", battery.watts, machine.clock, measured=True), battery.description


def _modelled(name: MeterName, powers: Powers, machine: Machine) -> tuple[StepMeter, str]:
    """By operations where the speed is stated, else by seconds."""
    watts, gflops, shape = powers.compute_w, powers.gflops, machine.shape
    if name == "workload" and (gflops is None or shape is None):
        what = "compute_gflops is not set" if gflops is None else "the shape of this model is not known"
        raise ConfigError(f"energy_meter = workload cannot be used: {what}. Use power, or auto.")
    if name != "power" and gflops is not None and shape is not None:
        text = f"modelled: {watts:g} W at {gflops:g} GFLOP/s (compute_watts, compute_gflops)"
        return WorkloadMeter("workload", shape, flops_per_s=gflops * _GIGA, watts=watts), text
    text = f"modelled: {watts:g} W while the engine computes (compute_watts)"
    return PowerMeter("power", lambda: watts, machine.clock, measured=False), text
