"""`paceline doctor` tells extras that work from those that are absent or broken."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.commands import diagnosis as checked
from paceline.commands.diagnosis import extras


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of others, by what importing them does."""
    texts: Mapping[str, str] = {
        "extra_whole": "",
        "extra_broken": "raise OSError('libcuda.so.1: cannot open shared object file')",
        "extra_bereft": "import extra_that_is_gone",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_an_extra_that_is_installed_and_cannot_be_imported_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checked,
        "EXTRAS",
        {"a": ("extra_whole",), "b": ("extra_whole", "extra_broken"), "c": ("extra_bereft",), "d": ("extra.absent",)},
    )
    status, text = extras()
    assert status == "warn"
    assert "b does not work (extra_broken: OSError: libcuda.so.1: cannot open" in text
    assert "c does not work (extra_bereft: No module named 'extra_that_is_gone')" in text
    assert "pip install 'paceline[c]'; a works; not installed: d" in text


@pytest.mark.usefixtures("installed")
def test_absent_extras_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "EXTRAS", {"a": ("extra_whole",), "d": ("extra_absent",)})
    assert extras() == ("ok", "a works; not installed: d")


def test_a_release_that_does_not_fit_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "EXTRAS", {"own": ("typer",)})
    monkeypatch.setattr(checked, "requires", lambda _: ["typer>=99; extra == 'own'", "pytest>=99; extra == 'other'"])
    status, text = extras()
    assert status == "warn" and "own does not work (typer" in text and "is not >=99" in text


def test_all_extras_of_the_package_are_looked_at() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(checked.EXTRAS) == set(project["optional-dependencies"]) - {"test", "lint"}
