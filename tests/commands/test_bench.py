"""`paceline bench`: modules are found by what they define; figures are shown, written and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.report import Claim, Options, Report
from paceline.commands import bench as command
from paceline.commands.main import build
from paceline.errors import ConfigError

MODULE = """
from bench.report import Claim, Options, Report
NAME = "stones"
SUMMARY = "how far a stone flies"
def run(options):
    rows = [{"stone": "flat", "metres": 12.34567}, {"stone": "round", "quick": options.quick}]
    return Report(NAME, {"seed": 7}, rows, [Claim("stones.far", 2.0, 1.5, "higher", "1.4x")])
"""
PLOT = """
def plot(report, file):
    file.write_text(report.bench)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed `paceline.bench` with one bench and one other module."""
    folder = tmp_path / "benches_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "report.py").write_text("from bench.report import *")
    (folder / "stones.py").write_text(MODULE + PLOT)
    monkeypatch.syspath_prepend(tmp_path)
    found = command.benches(folder.name)
    monkeypatch.setattr(command, "PACKAGE", folder.name)
    monkeypatch.setattr(command, "benches", lambda: found)
    return tmp_path


def test_modules_with_a_name_and_a_run_are_listed(package: Path) -> None:  # noqa: ARG001  # makes the modules
    assert CliRunner().invoke(build(()), ["bench"]).stdout == "stones         how far a stone flies\n"


def test_a_run_shows_rows_and_claims_and_writes_them(package: Path) -> None:
    files = {kind: package / f"out.{kind}" for kind in ("json", "txt")}
    arguments = ["bench", "stones", "--quick", "--json", str(files["json"]), "--plot", str(files["txt"])]
    result = CliRunner().invoke(build(()), arguments)
    assert result.stdout.splitlines() == [
        "stone  metres  quick",
        " flat   12.35       ",
        "round           True",
        "stones.far = 2 (target >= 1.5): holds",
    ]
    written = json.loads(files["json"].read_text())
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
    assert files["txt"].read_text() == "stones"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("pebbles",), "unknown bench pebbles: choose one of stones"),
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


def test_a_package_that_is_not_installed_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"pip install -e \."):
        command.benches("a_package_that_nobody_has")


@pytest.mark.parametrize(
    ("value", "better", "holds"),
    [(1.5, "higher", True), (1.49, "higher", False), (1.5, "lower", True), (1.51, "lower", False)],
)
def test_a_claim_holds_at_its_target_and_beyond(value: float, better: str, holds: bool) -> None:
    claim = Claim("some.ratio", value, 1.5, better)  # type: ignore[arg-type]  # parametrised
    assert claim.holds is holds
    assert command.verdict(claim).endswith(": holds" if holds else ": does not hold")


def test_every_bench_of_the_repository_can_be_loaded_and_says_what_it_measures() -> None:
    for name, module in command.benches("bench").items():
        assert name == module.NAME
        assert module.SUMMARY
        assert callable(module.run)


def test_a_report_without_rows_is_no_table() -> None:
    assert command.table([]) == []
    assert Report("empty", {}, []).to_json()["claims"] == []
    assert Options() == Options(quick=False, data=None)


def test_a_claim_holds_only_if_its_whole_interval_does() -> None:
    assert Claim("a", 2.0, 1.5, "higher", interval=(1.6, 3.0)).holds
    assert not Claim("a", 2.0, 1.5, "higher", interval=(1.4, 3.0)).holds
    assert not Claim("a", 1.0, 1.5, "lower", interval=(0.5, 1.6)).holds
    assert (
        command.verdict(Claim("a", 1.0, 1.5, "lower", interval=(0.5, 1.6)))
        == "a = 1 [0.5, 1.6] (target <= 1.5): does not hold"
    )
