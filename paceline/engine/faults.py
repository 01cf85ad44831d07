"""Conversion of torch's errors into the engine's."""

from __future__ import annotations

import torch

from paceline.errors import EngineError, EngineLost


def engine_error(error: RuntimeError, device: torch.device) -> EngineError:
    """A forward has failed: it ran out of memory, or the device is lost.

    CUDA reports a fault late and then on every call, so the device itself is asked.
    """
    if device.type == "cuda":
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        else:
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as fault:
                return EngineLost(f"the GPU has failed: {fault}")
    return EngineError(f"the model could not run: {error}")
