from __future__ import annotations

from types import ModuleType

import pytest

from paceline.engine.paged import layer_kernel
from tests.engine.native_build import build


@pytest.fixture(scope="session")
def built_layer_kernel(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return build("_layer_kernel", tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch, built_layer_kernel: ModuleType) -> None:
    """The kernel as its source is now."""
    monkeypatch.setattr(layer_kernel, "kernel", lambda: built_layer_kernel)
