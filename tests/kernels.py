"""Kernels in C, built from their sources."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def built(module_name: str, folder: Path) -> ModuleType:
    """A kernel as its source is now, whatever the installation has."""
    extensions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (extension,) = (each for each in extensions if each["name"] == module_name)
    compiler = shutil.which("cc")
    assert compiler is not None, "install a C compiler: the kernel is tested as it is built"
    name = module_name.rpartition(".")[2]
    file = folder / f"{name}.so"
    sources = [str(ROOT / source) for source in extension["sources"]]
    options = [*extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-lm"]
    command = [compiler, *sources, f"-I{sysconfig.get_path('include')}", "-o", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
