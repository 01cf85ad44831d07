"""`paceline bench`: modules are found by what they define; figures are shown, written and drawn."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.report import Claim
from paceline.commands.main import build
from paceline.errors import ConfigError

command = importlib.import_module("paceline.bench.command")  # as the command loads it
MODULE = """
from bench.report import Claim, Options, Report
NAME = "stones"
SUMMARY = "how far a stone flies"
def run(options):
    rows = [{"stone": "flat", "metres": 12.34567}, {"stone": "round", "quick": options.quick}]
    return Report(NAME, {"seed": 7}, rows, [Claim("stones.far", 2.0, 1.5, "higher", "1.4x")])
"""
PLOT = """
def plot(report):
    return f"<svg>{report.bench}</svg>"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed `paceline.bench` with one bench and one other module."""
    folder = tmp_path / "benches_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "report.py").write_text("from bench.report import *")
    (folder / "plots.py").write_text("from bench.plots import *")
    (folder / "models.py").write_text("from bench.models import *")
    (folder / "stones.py").write_text(MODULE + PLOT)
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "lacking.py").write_text('import a_package_that_nobody_has\nNAME: str = "lacking"\nSUMMARY = "nothing"\n')
    found = command.benches(folder.name)
    monkeypatch.setattr(command, "PACKAGE", folder.name)
    monkeypatch.setattr(command, "benches", lambda: found)
    return tmp_path


def test_modules_with_a_name_and_a_run_are_listed(package: Path) -> None:  # noqa: ARG001  # makes the modules
    listed = "lacking        nothing\nstones         how far a stone flies\n"
    assert CliRunner().invoke(build(()), ["bench"]).stdout == listed


def test_a_run_shows_rows_and_claims_and_writes_them(package: Path) -> None:
    file, reports = package / "out.json", package / "reports"
    arguments = ["bench", "stones", "--quick", "--json", str(file), "--report", str(reports)]
    result = CliRunner().invoke(build(()), arguments)
    assert result.stdout.splitlines() == [
        "stone  metres  quick",
        " flat   12.35       ",
        "round           True",
        "stones.far = 2 (target >= 1.5): holds",
    ]
    written = json.loads(file.read_text())
    assert written["claims"] == json.loads((reports / "stones.json").read_text())["claims"]
    assert set(written) == {"bench", "commit", "conditions", "rows", "claims"}
    assert written["claims"] == [
        {
            "name": "stones.far",
            "value": 2.0,
            "target": 1.5,
            "better": "higher",
            "paper": "1.4x",
            "interval": None,
            "holds": True,
        }
    ]
    assert (reports / "stones.svg").read_text() == "<svg>stones</svg>"
    page = (reports / "index.html").read_text()
    assert "<td>stones.far</td><td>2</td><td></td><td>≥ 1.5</td><td>yes</td><td>1.4x</td>" in page
    assert 'src="stones.svg"' in page and "seed 7" in page and page.count("<svg ") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("pebbles",), "unknown bench pebbles: choose one of lacking, stones, or all"),
        (("lacking",), "bench lacking needs a_package_that_nobody_has, which is not installed: run `pip install"),
        (("all", "--json", "x.json"), "bench all writes a file for each bench"),
        (("all", "--models", "smollm"), "bench all runs each bench on its own models"),
        (("stones", "--models", "smollm"), "bench stones runs on its own models"),
        (("stones", "--json", "/nowhere/at/all.json"), "/nowhere/at does not exist"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    package: Path,  # noqa: ARG001  # makes the modules
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    result = CliRunner().invoke(build(()), ["bench", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert sentence in str(result.exception)


def test_every_bench_of_the_repository_can_be_loaded_and_says_what_it_measures() -> None:
    found = command.benches("bench")
    assert len(found) >= 18
    for name, listed in found.items():
        module = listed.load()
        assert (name, listed.summary) == (module.NAME, module.SUMMARY)  # type: ignore[attr-defined]  # of its source
        assert callable(module.run)


def test_a_claim_holds_from_its_target_on_with_its_whole_interval() -> None:
    for value, better, holds in ((1.5, "higher", True), (1.49, "higher", False), (1.51, "lower", False)):
        assert Claim("a", value, 1.5, better).holds is holds  # type: ignore[arg-type]  # one of two words
    assert Claim("a", 2.0, 1.5, "higher", interval=(1.6, 3.0)).holds
    assert command.verdict(Claim("a", 2.0, None, "higher", interval=(1.6, 3.0))) == "a = 2 [1.6, 3]"
    assert not Claim("a", 2.0, 1.5, "higher", interval=(1.4, 3.0)).holds
    assert not Claim("a", 1.0, 1.5, "lower", interval=(0.5, 1.6)).holds
    told = command.verdict(Claim("a", 1.0, 1.5, "lower", interval=(0.5, 1.6)))
    assert told == "a = 1 [0.5, 1.6] (target <= 1.5): does not hold"
