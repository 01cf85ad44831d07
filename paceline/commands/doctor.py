"""`paceline doctor`: check machine, installation and settings. One line per subject; exit code 1 if one fails."""

from __future__ import annotations

import os

import typer

from paceline.commands.options import Config, Json, write_json
from paceline.settings import SCHEMAS
from paceline.settings_sources import resolve


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: paceline doctor --json")(doctor)


def doctor(context: typer.Context, as_json: Json = False, config: Config = None) -> None:
    """Look at the machine, the installation, the settings with their models and link, and what runs; say what will not
    work and why."""
    from paceline.commands import diagnosis

    nodes = tuple(resolve(schema, {}, os.environ, config)[0] for schema in SCHEMAS)
    found = []
    for check in diagnosis.run(nodes, context.obj.checks):
        found.append(check)
        if not as_json:
            typer.echo(f"{check.status:<5} {check.name:<18} {check.text}")
    failed = any(check.status == "fail" for check in found)
    if as_json:
        write_json({"ok": not failed, "checks": found})
    if failed:
        raise typer.Exit(1)
