"""The ways to sample on a machine without a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest

from paceline.engine.sampling import batch_sampler, open_sampler, row_kernel, workspace
from tests.kernels import built


@pytest.fixture(scope="session")
def built_kernel() -> ModuleType:
    """The kernel as its source is now, whatever the installation has."""
    return built("paceline.engine.sampling._row_kernel")


@pytest.fixture(params=["kernel", "torch", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, built_kernel: ModuleType) -> None:
    """Rows are sampled on a CPU by the kernel and without it, and as on a device of which every look is a wait."""
    monkeypatch.setattr(row_kernel, "kernel", lambda: built_kernel if request.param == "kernel" else None)
    if request.param == "device":
        for module in (batch_sampler, open_sampler, workspace):
            monkeypatch.setattr(module, "is_remote", lambda _: True)
