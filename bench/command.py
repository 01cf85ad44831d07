"""`paceline bench`: run one of the modules beside this one, show its claims, write its JSON and a page with its plots.

A module is a bench if it assigns NAME and SUMMARY and has run; `report` defines its options and its report.
Measures nothing itself. A claim that does not hold is no error: the figure is the result.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from .report import Claim

PACKAGE = "paceline.bench"
ALL = "all"


@dataclass(frozen=True, slots=True)
class ListedBench:
    """A bench as its source describes it; nothing of it is imported yet."""

    name: str
    summary: str
    module: str

    def load(self) -> Any:
        """Its module, whose `run` returns a `Report` and whose `plot`, if there is one, draws its rows as SVG."""
        package = importlib.import_module(PACKAGE)
        checkout = Path(str(package.__file__)).parents[1]
        if (checkout / "lab" / "__init__.py").is_file():
            sys.path.append(str(checkout))
        return importlib.import_module(self.module)


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: paceline bench engine --quick --json engine.json")(bench)


def bench(
    name: Annotated[str | None, typer.Argument(help="which, or all; without a name: list them")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer repetitions: some minutes at most")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="write conditions, rows and claims there"),
    ] = None,
    report_folder: Annotated[
        Path | None, typer.Option("--report", help="write results there, and a page with plots of all that lie there")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="folder with the evaluation sets")] = None,
    models: Annotated[
        str | None, typer.Option("--models", help="real ones: smollm, qwen, a model, or the device's,the cloud's")
    ] = None,
) -> None:
    """Measure one claim against its baselines, in one run on this machine."""
    found = benches()
    if name is None:
        for each in found.values():
            typer.echo(f"{each.name:<14} {each.summary}")
        return
    if name == ALL:
        if models:
            raise ConfigError("bench all runs each bench on its own models: leave --models out")
        if json_file:
            raise ConfigError("bench all writes a file for each bench: give a folder with --report")
        _run_all(found, ["--quick"] * quick + (["--data", str(data)] if data else []), report_folder)
        return
    if name not in found:
        raise ConfigError(f"unknown bench {name}: choose one of {', '.join(found) or '(none is installed)'}, or {ALL}")
    if json_file and not json_file.absolute().parent.is_dir():
        where = json_file.absolute().parent
        raise ConfigError(f"{where} does not exist: make it, or choose another place for {json_file}")
    if report_folder:
        _make(report_folder)
    try:
        chosen = found[name].load()
        if models and not getattr(chosen, "MODELS", False):
            raise ConfigError(f"bench {name} runs on its own models: leave --models out")
        real = importlib.import_module(f"{PACKAGE}.models").RealModels.parse(models) if models else None
        options = importlib.import_module(f"{PACKAGE}.report").Options(quick=quick, data=data, models=real)
        report = chosen.run(options)
    except ModuleNotFoundError as error:
        if error.name == "lab":
            raise ConfigError(f"bench {name} needs the folder lab of the repository: run it in a checkout.") from error
        raise ConfigError(
            f"bench {name} needs {error.name}, which is not installed: run `pip install 'paceline[bench]'`."
        ) from error
    if json_file:
        report.write(json_file)
    if report_folder:
        report.write(report_folder / f"{name}.json")
        if hasattr(chosen, "plot"):
            (report_folder / f"{name}.svg").write_text(chosen.plot(report), "utf-8")
        importlib.import_module(f"{PACKAGE}.plots").write_page(report_folder)
    for line in table(report.rows):
        typer.echo(line)
    for claim in report.claims:
        typer.echo(verdict(claim))


def _run_all(found: Mapping[str, ListedBench], options: Sequence[str], folder: Path | None) -> None:
    """Every bench in a process of its own, one after another; a table of what came of each."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        reports = folder or Path(temporary)
        _make(reports)
        for number, name in enumerate(found, 1):
            typer.echo(f"\n{name} ({number} of {len(found)})", color=False)
            file, began = reports / f"{name}.json", time.monotonic()
            file.unlink(missing_ok=True)
            command = [sys.executable, "-m", "paceline", "bench", name, *options, "--report", str(reports)]
            ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
            typer.echo(ended.stderr, err=True, nl=False)
            row: dict[str, object] = {"bench": name, "seconds": round(time.monotonic() - began)}
            if ended.returncode == 0 and file.exists():
                claims = json.loads(file.read_text())["claims"]
                row |= {"claims": len(claims), "hold": sum(claim["holds"] for claim in claims)}
            else:
                row["failed"] = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
            rows.append(row)
    for line in ("", *table(rows)):
        typer.echo(line)
    if any("failed" in row for row in rows):
        raise typer.Exit(1)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}. Choose another folder.") from error


def benches(package: str = PACKAGE) -> dict[str, ListedBench]:
    """Benches by name, sorted, as their sources describe them: what one of them needs is no concern of the others."""
    found = []
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        spec = importlib.util.find_spec(info.name)
        if spec is not None and spec.origin is not None:
            constants = _constants(Path(spec.origin))
            if {"NAME", "SUMMARY"} <= constants.keys():
                found.append(ListedBench(constants["NAME"], constants["SUMMARY"], info.name))
    return {bench.name: bench for bench in sorted(found, key=lambda each: each.name)}


def _constants(source: Path) -> dict[str, str]:
    """The texts that a module assigns at its top."""
    found = {}
    for node in ast.parse(source.read_text("utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            found[target.id] = value.value
    return found


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Format rows as aligned text; the columns are the keys of all rows in order of first occurrence."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells if columns]


def verdict(claim: Claim) -> str:
    spread = "" if claim.interval is None else " [{:.3g}, {:.3g}]".format(*claim.interval)
    if claim.target is None:
        return f"{claim.name} = {claim.value:.3g}{spread}"
    sign = ">=" if claim.better == "higher" else "<="
    held = "holds" if claim.holds else "does not hold"
    return f"{claim.name} = {claim.value:.3g}{spread} (target {sign} {claim.target:g}): {held}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
