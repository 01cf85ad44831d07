"""`paceline profile`: what operations take on a side's units, measured in advance or as a node has learnt it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.commands.options import Config, Json, StateDir
from paceline.errors import ConfigError
from paceline.settings import AgentSettings, NodeSettings, ServerSettings
from paceline.settings_sources import resolve

if TYPE_CHECKING:
    from paceline.runtime.workflows.kept_profiles import ProfileFile

Side = Annotated[Literal["cloud", "device"], typer.Option("--side", help="whose settings and state directory are used")]


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: paceline profile --side device --seconds 120 --plot profile.png")(profile)


def profile(
    side: Side = "device",
    model: Annotated[str | None, typer.Option("--model", help="default: that of the side's settings")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, max=3600.0, help="to measure for")] = 60.0,
    show: Annotated[bool, typer.Option("--show", help="measure nothing: show what is stored")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="draw it there (.png, .svg, .pdf)")] = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Measure what each operation of workflows takes on this side's units, alone and beside other work.

    A node believes it while model, embedder, machine and threads are the same, and refines it. Measure while the node
    is idle, or stopped: what it does meanwhile counts as the operations' own time.
    """
    from paceline.commands.profile_output import draw, needs_plotting, write_json, write_table
    from paceline.runtime.workflows.kept_profiles import FILE, ProfileFile

    if plot is not None:
        needs_plotting(plot)
    flags = {"state_dir": state_dir, "model": model}
    settings, _ = resolve(ServerSettings if side == "cloud" else AgentSettings, flags, os.environ, config)
    file = ProfileFile(settings.state_dir / FILE)
    if not show:
        _measure(settings, seconds, file)
    found = file.read()
    if found is None:
        raise ConfigError(f"{file.path} does not exist: run `paceline profile --side {side}` without --show first.")
    if as_json:
        write_json(found)
    else:
        write_table(found)
    if plot is not None:
        draw(found, plot)


def _measure(settings: NodeSettings, seconds: float, file: ProfileFile) -> None:
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from paceline.bootstrap import open_model, open_profiles, open_reranker, open_store, step_limits, workflow_units
    from paceline.models import shipped
    from paceline.runtime.profiling import measure_side

    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f} %  {task.description}"))
    with open_store(settings) as store, Progress(*columns, console=console, transient=True) as bar:
        loaded = open_model(settings, shipped(settings.side))
        task = bar.add_task("the model is loaded", total=1.0)
        measured = asyncio.run(
            measure_side(
                settings.side,
                loaded,
                store,
                open_profiles(settings, loaded, store),
                workflow_units(settings),
                open_reranker(settings, store),
                limits=step_limits(settings),
                budget=seconds,
                progress=lambda text, share: bar.update(task, description=text, completed=share),
            )
        )
    file.write(measured.encode())
