"""Meters of the machine, on files and libraries made by hand: nothing here depends on the machine's own."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.energy import CounterMeter, Energy, MeterUnreadable
from paceline.core.offloading import ModelShape
from paceline.errors import ConfigError
from paceline.runtime import energy
from paceline.runtime.energy import LOOK_S, Battery, Nvml, Rapl, choose_meter
from paceline.settings_tables import EnergySettings
from tests.clocks import read_from

ENERGY = EnergySettings.model_validate({})
RANGE = 262_143_328_850  # µJ, of a real package


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of a machine whose counters and batteries lie in `tmp_path`, without NVIDIA's library."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setattr(energy, "POWER_SUPPLY", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    clock = Clock()
    read_from(monkeypatch, clock, energy)
    return clock


def settings(**changes: Any) -> EnergySettings:
    return ENERGY.model_copy(update=changes)


def zone(folder: Path, number: str, name: str, energy: int, span: int = RANGE) -> Path:
    """A zone as the kernel shows it."""
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True)
    for file, value in {"name": name, "energy_uj": energy, "max_energy_range_uj": span}.items():
        (path / file).write_text(f"{value}\n")
    return path


# ---- RAPL -----------------------------------------------------------------------------------------------------------
def test_packages_and_memory_are_added_and_parts_of_a_package_are_not(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "0", "package-0", 1_000_000), zone(tmp_path, "1", "package-1", 0)
    core, dram = zone(tmp_path, "0:0", "core", 5), zone(tmp_path, "0:2", "dram", 10)
    psys = zone(tmp_path, "2", "psys", 7)
    (tmp_path / "intel-rapl").mkdir()
    rapl = Rapl()
    assert rapl.description == "RAPL, package-0, package-1, dram"
    meter = CounterMeter("rapl", rapl.read)
    meter.begin()
    for path, value in {first: 3_000_000, second: 500_000, dram: 1_000_010, core: 9_000_000, psys: 9_000_000}.items():
        (path / "energy_uj").write_text(str(value))
    assert meter.end(()) == Energy(pytest.approx(3.5), measured=True)  # type: ignore[arg-type]  # compares as a float


def test_a_counter_wraps_at_its_range(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", RANGE - 1_000_000)
    meter = CounterMeter("rapl", Rapl().read)
    meter.begin()
    (package / "energy_uj").write_text("2000000")
    assert meter.end(()).joules == pytest.approx(3.0)


def test_counters_of_root_alone_are_named_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux since 2020. Tests may run as root, whom no mode stops."""
    counter = zone(tmp_path, "0", "package-0", 1) / "energy_uj"
    read = Path.read_text

    def refused(path: Path, *arguments: Any, **options: Any) -> str:
        if path == counter:
            raise PermissionError(13, "Permission denied")
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(MeterUnreadable, match="can be read by root alone"):
        Rapl()
    chosen = choose_meter(ENERGY, None)
    assert "modelled: 12 W" in chosen.text and "root alone" in chosen.text
    with pytest.raises(ConfigError, match=r"energy\.meter = rapl cannot be used.*root alone"):
        choose_meter(settings(meter="rapl"), None)


def test_a_machine_without_counters_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "missing", tmp_path):
        monkeypatch.setattr(energy, "POWERCAP", folder)
        with pytest.raises(MeterUnreadable, match="no RAPL counters"):
            Rapl()
    (zone(tmp_path, "0", "package-0", 1) / "energy_uj").write_text("soon")
    with pytest.raises(MeterUnreadable, match="cannot be read"):
        Rapl()


# ---- NVML -----------------------------------------------------------------------------------------------------------
class FakeNvml(SimpleNamespace):
    """The functions of `pynvml` that are used, for one GPU."""

    class NVMLError(Exception):
        pass

    millijoules: int | None = 1_000
    uuid = "GPU-11"

    def nvmlInit(self) -> None: ...  # noqa: N802  # the library's names

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != self.uuid:
            raise self.NVMLError("Not Found")
        return 0

    def nvmlDeviceGetName(self, gpu: int) -> str:  # noqa: N802, ARG002
        return "NVIDIA H200"

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:  # noqa: N802, ARG002
        if self.millijoules is None:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def installed(monkeypatch: pytest.MonkeyPatch, library: FakeNvml) -> FakeNvml:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_a_gpu_is_found_by_the_name_that_cuda_gives_it_and_its_counter_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library, now = installed(monkeypatch, FakeNvml()), [0.0]
    meter = CounterMeter("nvml", Nvml("11", lambda: now[0]).read)
    meter.begin()
    library.millijoules = 3_500
    assert meter.end(()).joules == 0.0, "the driver is asked no more often than it refreshes the counter"
    now[0] = 0.2
    assert meter.end(()).joules == pytest.approx(2.5)
    assert Nvml().description == "NVML, NVIDIA H200"
    with pytest.raises(MeterUnreadable, match="Not Found"):
        Nvml("22")


def test_a_gpu_without_a_counter_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeterUnreadable, match="nvidia-ml-py is not installed"):
        Nvml()
    installed(monkeypatch, FakeNvml(millijoules=None))
    with pytest.raises(MeterUnreadable, match="shows no energy: Not Supported"):
        Nvml()


# ---- a battery ------------------------------------------------------------------------------------------------------
def battery(folder: Path, name: str = "BAT0", **values: object) -> Path:
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    for file, value in {"type": "Battery", "status": "Discharging", **values}.items():
        (path / file).write_text(f"{value}\n")
    return path


def test_the_power_of_batteries_is_added_and_a_mouses_is_not(tmp_path: Path) -> None:
    battery(tmp_path, power_now=6_000_000)
    battery(tmp_path, "BAT1", status="Unknown", current_now=-500_000, voltage_now=12_000_000)
    battery(tmp_path, "hidpp_battery_0", scope="Device", power_now=99_000_000)
    (tmp_path / "AC").mkdir()
    (tmp_path / "AC" / "type").write_text("Mains\n")
    found = Battery()
    assert found.watts() == pytest.approx(12.0) and found.description == "battery, BAT0, BAT1"


def test_while_it_charges_it_measures_nothing_and_the_model_stands_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    path = battery(tmp_path, power_now=6_000_000)
    chosen = choose_meter(settings(meter="battery", compute_watts=20.0), None)
    assert chosen.meter is not None and chosen.text == "measured: battery, BAT0"
    chosen.meter.begin()
    clock.now = 2.0
    assert chosen.meter.end(()) == Energy(12.0, measured=True)
    (path / "status").write_text("Charging\n")
    for clock.now in (2.0 + LOOK_S, 3.0 + LOOK_S):
        with caplog.at_level(logging.WARNING):
            assert chosen.meter.end(()) == Energy(20.0, measured=False)
    assert [record.getMessage() for record in caplog.records if "does not run on its battery" in record.getMessage()]
    assert len(caplog.records) == 1


def test_a_machine_without_a_battery_or_a_telling_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(MeterUnreadable, match="no battery"):
        Battery()
    battery(tmp_path, capacity=80)
    with pytest.raises(MeterUnreadable, match="neither power_now nor current_now"):
        Battery()


# ---- the choice -----------------------------------------------------------------------------------------------------
def test_auto_takes_what_measures_the_processor_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = zone(tmp_path, "0", "package-0", 1)
    battery(tmp_path, power_now=1)
    installed(monkeypatch, FakeNvml())
    names = {}
    for gpu in (False, True):
        chosen = choose_meter(ENERGY, None, gpu=gpu)
        assert chosen.meter is not None and chosen.text.startswith("measured: ")
        names[gpu] = chosen.meter.name
    assert names == {False: "rapl", True: "nvml"}
    package.rename(tmp_path / "gone")
    on_battery = choose_meter(ENERGY, None)
    assert on_battery.meter is not None and on_battery.meter.name == "battery"


def test_without_any_the_model_is_the_stated_one_and_the_sentence_says_why() -> None:
    chosen = choose_meter(settings(compute_watts=30.0), None)
    assert chosen.meter is not None and chosen.meter.name == "power"
    assert chosen.text == (
        "modelled: 30 W while the engine computes (compute_watts); not measured: this machine has no RAPL counters; "
        "this machine has no battery"
    )
    by_operations = choose_meter(settings(compute_gflops=40.0), ModelShape(24, 896, 4864))
    assert by_operations.meter is not None and by_operations.meter.name == "workload"
    assert choose_meter(settings(meter="off"), None).meter is None


@pytest.mark.parametrize(
    ("gflops", "shape", "why"),
    [(None, ModelShape(1, 8, 8), "compute_gflops is not set"), (1.0, None, "shape of this model")],
)
def test_operations_cannot_be_counted_without_speed_or_shape(
    gflops: float | None, shape: ModelShape | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        choose_meter(settings(meter="workload", compute_gflops=gflops), shape)
