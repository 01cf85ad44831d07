"""Energy of one of NVIDIA's GPUs, from its own counter (Volta and later), through the library `nvidia-ml-py`.

The counter is refreshed some ten times a second: it is right over many steps, not for one. Measured: the whole board,
idle power and other programs' work included. Not handled: a part of a GPU (MIG), which has no counter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.core.energy import MeterUnreadable, Reading

_MILLI: Final = 1e-3


class Nvml:
    """Raises MeterUnreadable without the library, its driver, that GPU or its counter."""

    def __init__(self, uuid: str | None = None, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")):
        """uuid: of the GPU, as CUDA tells it, since the two number GPUs differently; None: the first one. load: the
        library, which ships no types and need not be installed."""
        try:
            self._nvml = load()
        except ImportError:
            raise MeterUnreadable("the library nvidia-ml-py is not installed: `pip install 'paceline[nvml]'`") from None
        try:
            self._nvml.nvmlInit()
            name = None if uuid is None else uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            by_index, by_uuid = self._nvml.nvmlDeviceGetHandleByIndex, self._nvml.nvmlDeviceGetHandleByUUID
            self._gpu = by_index(0) if name is None else by_uuid(name)
            self.description = f"NVML, {_text(self._nvml.nvmlDeviceGetName(self._gpu))}"
        except self._nvml.NVMLError as error:
            raise MeterUnreadable(f"NVML cannot be used: {error}") from None
        self.read()

    def read(self) -> Sequence[Reading]:
        """Joules since the driver was loaded. Raises MeterUnreadable."""
        try:
            return [Reading(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) * _MILLI)]
        except self._nvml.NVMLError as error:
            raise MeterUnreadable(f"NVML shows no energy: {error}") from None


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name
