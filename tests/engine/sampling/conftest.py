"""The ways to sample on a machine without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from paceline.engine.sampling import batch_sampler, noise, open_sampler, row_kernel, workspace

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def built_kernel(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The kernel as its source is now, whatever the installation has."""
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    compiler = shutil.which("cc")
    assert compiler is not None, "install a C compiler: the kernel is tested as it is built"
    file = tmp_path_factory.mktemp("kernel") / "_row_kernel.so"
    sources = [str(ROOT / source) for source in extension["sources"]]
    options = [*extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-lm"]
    command = [compiler, *sources, f"-I{sysconfig.get_path('include')}", "-o", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spec = spec_from_file_location("_row_kernel", file, loader=ExtensionFileLoader("_row_kernel", str(file)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["kernel", "torch", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, built_kernel: ModuleType) -> None:
    """Rows are sampled on a CPU by the kernel and without it, and as on a device of which every look is a wait."""
    monkeypatch.setattr(row_kernel, "kernel", lambda: built_kernel if request.param == "kernel" else None)
    if request.param == "device":
        for module in (batch_sampler, noise, open_sampler, workspace):
            monkeypatch.setattr(module, "is_remote", lambda _: True)
