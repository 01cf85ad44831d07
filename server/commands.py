"""`paceline serve` and `paceline devices`; `paceline keys` is beside."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import options
from paceline.errors import ConfigError
from paceline.settings import Origins, ServerSettings, describe, resolve

from . import key_commands
from .devices import CODE_LIFE_S, Registry
from .options import Config, Json, StateDir


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: paceline serve --model Qwen/Qwen2.5-7B-Instruct")(options(ServerSettings)(serve))
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Add, list and revoke the devices that may link to this server.",
        epilog="Example: paceline devices add phone",
    )
    group.command(epilog="Example: paceline devices add phone")(add)
    group.command("list", epilog="Example: paceline devices list --json")(list_)
    group.command(epilog="Example: paceline devices revoke phone")(revoke)
    app.add_typer(group, name="devices")
    key_commands.register(app)


def serve(settings: ServerSettings, origins: Origins) -> None:
    """Serve the cloud's model and public documents, alone or together with devices."""
    from paceline.api.http.server import configure_logging

    from .program import run  # torch is imported here, not for `paceline --help`

    configure_logging(settings.log_level)
    for line in describe(settings, origins):
        logging.getLogger("paceline.settings").info("%s", line)
    asyncio.run(run(settings))


def add(
    name: Annotated[str, typer.Argument(help="what the device is called here")],
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a one-time code that lets one device in under this name. It holds for ten minutes."""
    code = _registry(state_dir, config).add(name)
    if as_json:
        typer.echo(json.dumps({"device": name, "code": code, "expires_in_s": CODE_LIFE_S}))
        return
    typer.echo(code)
    typer.echo(f"At the device, within ten minutes: paceline agent --cloud URL --code {code}", err=True)


def list_(state_dir: StateDir = None, config: Config = None, as_json: Json = False) -> None:
    """List the devices and whether they may link."""
    devices = _registry(state_dir, config).devices()
    if as_json:
        rows = [{"device": device.name, "state": device.state, "since": device.since} for device in devices]
        typer.echo(json.dumps(rows, indent=2))
        return
    for device in devices:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(device.since))
        typer.echo(f"{device.name:<24} {device.state:<8} {'until' if device.state == 'waiting' else 'since'} {when}")
    if not devices:
        typer.echo("no devices yet: add one with `paceline devices add NAME`", err=True)


def revoke(
    name: Annotated[str, typer.Argument(help="as `paceline devices list` shows it")],
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Let a device in no more; a link it holds is cut within seconds."""
    if not _registry(state_dir, config).revoke(name):
        raise ConfigError(f"There is no device {name}; see `paceline devices list`.")
    typer.echo(f"revoked {name}")


def _registry(state_dir: Path | None, config: Path | None) -> Registry:
    settings, _ = resolve(ServerSettings, {"state_dir": state_dir}, os.environ, config)
    return Registry(settings.state_dir)
