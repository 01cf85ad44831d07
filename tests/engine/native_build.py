"""The engine's kernels in C, built from their sources as they are now, whatever the installation has."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def extensions() -> dict[str, dict[str, list[str]]]:
    """What the installation builds, by the last part of its name."""
    every = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    return {each["name"].rpartition(".")[2]: each for each in every}


def build(name: str, folder: Path) -> ModuleType:
    """The module of this name, compiled into the folder with every warning an error."""
    extension = extensions()[name]
    compiler = shutil.which("cc")
    assert compiler is not None, "install a C compiler: the kernels are tested as they are built"
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
