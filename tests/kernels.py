"""Kernels in C, built from their sources: once for all workers, and for all runs until a source changes."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sysconfig
import tomllib
from hashlib import sha256
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BUILT = ROOT / ".cache" / "kernels"


def built(module_name: str) -> ModuleType:
    """A kernel as its source is now, whatever the installation has."""
    extensions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    (extension,) = (each for each in extensions if each["name"] == module_name)
    compiler = shutil.which("cc")
    assert compiler is not None, "install a C compiler: the kernel is tested as it is built"
    name = module_name.rpartition(".")[2]
    sources = [str(ROOT / source) for source in extension["sources"]]
    options = [*extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-lm"]
    command = [compiler, *sources, f"-I{sysconfig.get_path('include')}", *options]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    texts = [Path(source).read_bytes() for source in sources]  # which include nothing of ours
    file = BUILT / f"{name}-{sha256(repr((command, version, texts)).encode()).hexdigest()}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            made = file.with_suffix(".made")
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            made.replace(file)
    spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
