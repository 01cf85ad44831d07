"""Profiles for people and programs: a table, a plot, JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.errors import ConfigError
from paceline.runtime.workflows.kept_profiles import StoredProfiles
from paceline.workflow.profiling import LOWEST, OperationProfile

WIDTH = 120  # of a table that is written into a file


def write_json(stored: StoredProfiles) -> None:
    """As it is stored."""
    typer.echo(json.dumps(json.loads(stored.encode()), indent=2))


def write_table(stored: StoredProfiles) -> None:
    """Seconds and GB/s by shape, and the slowdown φ at the bandwidths where it was found."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(title=f"measured {stored.measured}" if stored.measured else "learnt by a node", show_lines=True)
    for name in ("operation", "unit"):
        table.add_column(name, overflow="fold")
    for name in ("items", "ms", "GB/s", "φ at GB/s"):
        table.add_column(name, justify="right")
    rows: dict[tuple[object, ...], tuple[list[str], str, OperationProfile]] = {}
    for (operation, kind), profile in stored.profiles.items():
        same = kind, profile.points, profile.slowdown  # operations of one model
        rows.setdefault(same, ([], kind, profile))[0].append(operation)
    for operations, kind, profile in rows.values():
        table.add_row(
            escape("\n".join(operations)),
            escape(kind),
            "\n".join(str(point.shape) for point in profile.points),
            "\n".join(f"{1e3 * point.seconds:.3g}" for point in profile.points),
            "\n".join(f"{point.bandwidth:.3g}" if point.bandwidth else "?" for point in profile.points),
            "\n".join(slowdowns(profile)) or "1",
        )
    console.print(table)
    conditions = stored.conditions
    threads = f"{conditions.threads} engine threads" if conditions.threads else "no engine threads"
    texts = [
        f"{conditions.machine}; {threads}; model {conditions.model[:12]}; embedder {conditions.embedder}; "
        f"units: {conditions.units}."
    ]
    for text in (*texts, *stored.notes):
        console.print(text, markup=False, highlight=False)


def slowdowns(profile: OperationProfile) -> list[str]:
    """Factors at the knots, but for knots between equal ones, and for one that stands for no bandwidth."""
    pairs = list(zip(profile.slowdown.knots, profile.slowdown.factors, strict=True))
    pairs = [pair for pair in pairs if pair[0] > LOWEST]
    kept = [
        place
        for place, (_, factor) in enumerate(pairs)
        if not 0 < place < len(pairs) - 1 or pairs[place - 1][1] != factor or pairs[place + 1][1] != factor
    ]
    return [f"{pairs[place][1]:.2f} at {pairs[place][0]:.3g}" for place in kept]


def needs_plotting(file: Path) -> None:
    """Raises ConfigError, before anything is measured, where a plot cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'paceline[bench]'")
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot {file}: give a name that ends in .png, .svg or .pdf.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file.absolute().parent} does not exist: make it, or choose another place for {file}.")


def draw(stored: StoredProfiles, file: Path) -> None:
    """Seconds by shape, and slowdowns by bandwidth with their samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (operation, kind), profile in stored.profiles.items():
        label = f"{operation} ({kind})"
        shapes, seconds = zip(*[(point.shape, 1e3 * point.seconds) for point in profile.points], strict=True)
        left.plot(shapes, seconds, marker="o", label=label)
        samples = list(stored.profiles.samples(operation, kind))
        if samples:
            used, factors = zip(*samples, strict=True)
            dots = right.scatter(used, factors, s=6, alpha=0.4)
            line = sorted(used)
            right.plot(line, [profile.slowdown.at(each) for each in line], color=dots.get_facecolor()[0], label=label)
    left.set(xlabel="items of a launch", ylabel="ms, alone", xscale="log", yscale="log")
    right.set(xlabel="GB/s asked for by all", ylabel="slowdown φ", xscale="log")
    for axes in (left, right):
        if axes.has_data():
            axes.legend(fontsize="small")
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from error
