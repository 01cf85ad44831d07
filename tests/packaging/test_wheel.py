"""The wheel, installed in an environment and a directory that contain nothing of the repository.

The environment borrows this one's dependencies, so that the check takes seconds; `paceline` itself comes from the
wheel alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MAPPED = {name: f"paceline/{name}" for name in ("server", "device_agent", "client", "bench")}
BROUGHT = ("paceline", *MAPPED, "pyproject.toml", "setup.py", "README.md", "LICENSE")
IMPORT_ALL = """
import importlib.util, json, pkgutil, sys, paceline
names = [info.name for info in pkgutil.walk_packages(paceline.__path__, "paceline.")]
optional = []
for name in names:
    if name.endswith("__main__"):
        continue  # runs the command
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.startswith("paceline"):
            raise
        optional.append(error.name)
claimed = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(json.dumps({"modules": names, "file": paceline.__file__, "missing": optional, "claimed": claimed}))
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def sources() -> Iterator[str]:
    """Every file of the packages, by its path in the wheel."""
    for top in ("paceline", *MAPPED):
        for file in (ROOT / top).rglob("*"):
            relative = file.relative_to(ROOT / top).as_posix()
            if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so":
                yield f"{MAPPED.get(top, top)}/{relative}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy because setuptools leaves files in the source tree; its kernels, which other tests
    run, without optimisation: that takes most of a build."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in BROUGHT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    project = (source / "pyproject.toml").read_text("utf-8")
    assert '"-O3"' in project and 'build-backend = "setuptools.build_meta"' in project
    (source / "pyproject.toml").write_text(project.replace('"-O3"', '"-O0"'), "utf-8")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # as pip does
    done = run(sys.executable, "-c", build, built, cwd=source)
    assert done.returncode == 0, done.stderr
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which the wheel is installed, and the checkout is not."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    interpreter = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", "--no-index")
    done = run(*pip, wheel, cwd=environment)
    assert done.returncode == 0, done.stderr
    # A .pth line that is a path is read for modules but not for further .pth files: this environment's editable
    # installation of the checkout stays out.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return interpreter


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name for name in sources() if not name.startswith("paceline/bench/") or name.endswith((".py", ".json"))}
    kernels = {
        f"paceline/{each}.abi3.so"
        for each in ("engine/sampling/_row_kernel", "engine/_layer_kernel", "rag/_encoder_kernel")
    }
    assert held == expected | kernels
    assert "-cp311-abi3-" in wheel.name, "one wheel for every Python"


def test_every_module_can_be_imported_and_none_claims_the_names_of_the_programs(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", IMPORT_ALL, *MAPPED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["file"].startswith(str(python.parents[1]))
    assert {"paceline.server", "paceline.device_agent", "paceline.client", "paceline.bench"} <= set(said["modules"])
    assert set(said["missing"]) <= {"lab", "triton"}, (
        "only the extras may be missing, and what benches need of the repository"
    )
    assert said["claimed"] == []


def test_the_command_runs_in_an_empty_directory(python: Path, tmp_path: Path) -> None:
    command = python.with_name("paceline")
    shown = run(command, "--help", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    for name in ("serve", "agent", "chat", "docs", "devices", "doctor", "demo", "bench"):
        assert f"\n  {name} " in shown.stdout
    assert list(tmp_path.iterdir()) == [], "looking must leave nothing behind"
