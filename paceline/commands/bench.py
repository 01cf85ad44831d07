"""`paceline bench`: run one of the modules in `bench/`, show its claims, write its JSON and its plot.

A module is a bench if it has NAME, SUMMARY and run; `bench/report.py` defines its options and its report. Measures
nothing itself. A claim that does not hold is no error: the figure is the result.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Protocol, cast

import typer

from paceline.errors import ConfigError

PACKAGE = "paceline.bench"


class Claim(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def value(self) -> float: ...

    @property
    def target(self) -> float: ...

    @property
    def better(self) -> str: ...

    @property
    def interval(self) -> tuple[float, float] | None: ...

    @property
    def holds(self) -> bool: ...


class Report(Protocol):
    @property
    def rows(self) -> Sequence[Mapping[str, object]]: ...

    @property
    def claims(self) -> Sequence[Claim]: ...

    def to_json(self) -> dict[str, object]: ...


class Bench(Protocol):
    """A module of `bench/`."""

    NAME: str
    SUMMARY: str

    def run(self, options: object) -> Report: ...


class Plotted(Bench, Protocol):
    def plot(self, report: Report, file: Path) -> None: ...


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: paceline bench engine --quick --json engine.json")(bench)


def bench(
    name: Annotated[str | None, typer.Argument(help="which; without a name: list them")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer repetitions: a minute at most")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write conditions, rows and claims there")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw the graph there (.png, .svg, .pdf)")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="folder with the evaluation sets")] = None,
) -> None:
    """Measure one claim against its baselines, in one run on this machine."""
    found = benches()
    if name is None:
        for each in found.values():
            typer.echo(f"{each.NAME:<14} {each.SUMMARY}")
        return
    if name not in found:
        raise ConfigError(f"unknown bench {name}: choose one of {', '.join(found) or '(none is installed)'}")
    chosen = found[name]
    if plot_file and not hasattr(chosen, "plot"):
        raise ConfigError(f"bench {name} draws no graph: leave --plot out")
    for file in (json_file, plot_file):
        if file and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file.absolute().parent} does not exist: make it, or choose another place for {file}")
    options = importlib.import_module(f"{PACKAGE}.report").Options(quick=quick, data=data)
    report = chosen.run(options)
    if json_file:
        json_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if plot_file:
        cast(Plotted, chosen).plot(report, plot_file)
    for line in table(report.rows):
        typer.echo(line)
    for claim in report.claims:
        typer.echo(verdict(claim))


def benches(package: str = PACKAGE) -> dict[str, Bench]:
    """Benches by name, sorted. Raises ConfigError where the package is not installed."""
    try:
        parent = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f"{package} is not installed: run `pip install -e .` in the checkout") from None
    modules = [importlib.import_module(f"{package}.{info.name}") for info in pkgutil.iter_modules(parent.__path__)]
    return {bench.NAME: bench for bench in sorted(filter(None, map(_as_bench, modules)), key=lambda each: each.NAME)}


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Format rows as aligned text; the columns are the keys of all rows in order of first occurrence."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells if columns]


def verdict(claim: Claim) -> str:
    sign = ">=" if claim.better == "higher" else "<="
    held = "holds" if claim.holds else "does not hold"
    spread = "" if claim.interval is None else " [{:.3g}, {:.3g}]".format(*claim.interval)
    return f"{claim.name} = {claim.value:.3g}{spread} (target {sign} {claim.target:g}): {held}"


def _as_bench(module: ModuleType) -> Bench | None:
    return cast(Bench, module) if hasattr(module, "NAME") and hasattr(module, "run") else None


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
