"""`paceline keys`."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError
from paceline.settings import ServerSettings, resolve

from .keys import Keys
from .options import Config, Json, StateDir


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Create, list and revoke the keys that let applications use this server.",
        epilog="Example: paceline keys create notebook --scope chat --expires 30",
    )
    group.command(epilog="Example: paceline keys create notebook --scope chat --scope embeddings")(create)
    group.command("list", epilog="Example: paceline keys list --json")(list_)
    group.command(epilog="Example: paceline keys revoke notebook")(revoke)
    app.add_typer(group, name="keys")


def create(
    name: Annotated[str, typer.Argument(help="what the key is called in lists")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="what it may do: chat, completions, responses, embeddings, files, vector_stores; "
            "give it once for each; default: all"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="the only device that joins its answers; default: any")] = None,
    expires: Annotated[float | None, typer.Option(metavar="DAYS", help="days it holds; default: until revoked")] = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it, this once: only its hash is kept. A running server knows it at once."""
    keys = _keys(state_dir, config)
    key = keys.create(name, scopes=scope or (), device=device, days=expires)
    if as_json:
        typer.echo(json.dumps({"name": name, "key": key}))
        return
    typer.echo(key)
    typer.echo("Keep it: it is not shown again. Clients send it as `Authorization: Bearer KEY`.", err=True)


def list_(state_dir: StateDir = None, config: Config = None, as_json: Json = False) -> None:
    """List the keys by name and prefix, with what they may do."""
    found = _keys(state_dir, config).all()
    if as_json:
        typer.echo(json.dumps([asdict(key) for key in found], indent=2))
        return
    for key in found:
        until = "" if key.expires_at is None else time.strftime(" until %Y-%m-%d", time.localtime(key.expires_at))
        since = time.strftime("%Y-%m-%d", time.localtime(key.created_at))
        may = "all" if key.scopes is None else ",".join(key.scopes)
        bound = "" if key.device is None else f" device {key.device}"
        typer.echo(f"{key.name:<24} {key.prefix}… {key.state:<8} since {since}{until} scopes {may}{bound}")
    if not found:
        typer.echo("no keys yet: make one with `paceline keys create NAME`", err=True)


def revoke(
    name: Annotated[str, typer.Argument(help="its name, or its prefix, as `paceline keys list` shows them")],
    state_dir: StateDir = None,
    config: Config = None,
) -> None:
    """Refuse a key from the next request on. Answers that are being written end as they would have."""
    if not _keys(state_dir, config).revoke(name):
        raise ConfigError(f"There is no key {name} that could be revoked; see `paceline keys list`.")
    typer.echo(f"revoked {name}")


def _keys(state_dir: Path | None, config: Path | None) -> Keys:
    settings, _ = resolve(ServerSettings, {"state_dir": state_dir}, os.environ, config)
    return Keys(settings.state_dir)
