"""`paceline serve`, `invite`, `devices`, `keys` and `database`.

Registry and keys are imported by the commands that open them: their libraries take longer than other commands do.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.commands.groups import devices_group, doctor_checks
from paceline.commands.options import Config, Json, StateDir, opened_database, options, settings_of
from paceline.errors import ConfigError
from paceline.settings import NodeSettings, ServerSettings
from paceline.settings_sources import Origins, describe_given

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.commands.diagnosis import Found
    from paceline.sql import Home

    from .devices import Registry
    from .keys import Keys


def register(app: typer.Typer) -> None:
    example = "Example: paceline serve --model Qwen/Qwen2.5-7B-Instruct"
    app.command(epilog=example)(options(ServerSettings)(serve))
    app.command(epilog="Example: paceline invite phone --url https://example.org")(invite)
    group = devices_group(app)
    group.command("add", epilog="Example: paceline devices add phone")(add_device)
    group.command("list", epilog="Example: paceline devices list --json")(list_devices)
    group.command("revoke", epilog="Example: paceline devices revoke phone")(revoke_device)
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Create, list and revoke the keys that let applications use this server.",
        epilog="Example: paceline keys create notebook --scope chat --expires 30",
    )
    group.command("create", epilog="Example: paceline keys create notebook --scope chat --scope embeddings")(create_key)
    group.command("list", epilog="Example: paceline keys list --json")(list_keys)
    group.command("revoke", epilog="Example: paceline keys revoke notebook")(revoke_key)
    app.add_typer(group, name="keys")
    group = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="The database that several servers share.",
        epilog="Example: paceline database copy --to postgresql://paceline@db/paceline",
    )
    group.command("copy", epilog="Example: paceline database copy --to postgresql://paceline@db/paceline")(copy_state)
    group.callback()(lambda: None)  # a group of one command is a group
    app.add_typer(group, name="database")
    doctor_checks(app)["shared database"] = _shared_database


def serve(settings: ServerSettings, origins: Origins) -> None:
    """Serve the cloud's model and public documents, alone or together with devices."""
    import asyncio

    from paceline.api.http.logs import configure_logging

    from .program import run  # torch is imported here, not for `paceline --help`

    configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("paceline.settings").info("%s", describe_given(settings, origins))
    asyncio.run(run(settings))


def add_device(
    name: Annotated[str, typer.Argument(help="what the device is called here")],
    role: Annotated[
        Literal["device", "stage"], typer.Option(help="stage: for `paceline stage`, of a model spread over machines")
    ] = "device",
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make a one-time code that lets one device in under this name. It holds for ten minutes."""
    from .devices import CODE_LIFE_S

    code = _registry(state_dir, config).add(name, role)
    if as_json:
        typer.echo(json.dumps({"device": name, "code": code, "expires_in_s": CODE_LIFE_S}))
        return
    typer.echo(code)
    command = "paceline agent --cloud URL" if role == "device" else "paceline stage --server URL"
    typer.echo(f"At the {role}, within ten minutes: {command} --code -   (it asks for the code)", err=True)


def invite(
    name: Annotated[str, typer.Argument(help="what the device is called here")],
    url: Annotated[
        str | None, typer.Option("--url", help="address by which the device reaches this server; default: public_url")
    ] = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Print a line that enrols a device, and shows each side the other's key. It holds once, for ten minutes."""
    settings = settings_of("cloud", config, state_dir=state_dir, public_url=url)
    address = (settings.public_url or f"http://127.0.0.1:{settings.port}").rstrip("/")
    invitation = f"{address}#{_registry(state_dir, config).add(name)}"
    if as_json:
        typer.echo(json.dumps({"device": name, "invitation": invitation}))
        return
    typer.echo(f"paceline join {shlex.quote(invitation)}")
    if settings.public_url is None:
        typer.echo("That is an address for this machine alone: give the server's with --url.", err=True)
    if sys.stderr.isatty():
        try:
            import segno
        except ModuleNotFoundError:
            return
        segno.make(invitation, error="m").terminal(out=sys.stderr, compact=True)


def list_devices(state_dir: StateDir = None, config: Config = None, as_json: Json = False) -> None:
    """List the devices and whether they may link."""
    devices = _registry(state_dir, config).devices()
    if as_json:
        rows = [
            {"device": device.name, "state": device.state, "since": device.since, "role": device.role}
            for device in devices
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for device in devices:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(device.since))
        since = "until" if device.state == "waiting" else "since"
        typer.echo(f"{device.name:<24} {device.state:<8} {since} {when}{' stage' if device.role == 'stage' else ''}")
    if not devices:
        typer.echo("no devices yet: add one with `paceline devices add NAME`", err=True)


def revoke_device(
    name: Annotated[str, typer.Argument(help="as `paceline devices list` shows it")],
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Let a device in no more; a link it holds is cut within seconds."""
    if not _registry(state_dir, config).revoke(name):
        raise ConfigError(f"There is no device {name}; see `paceline devices list`.")
    typer.echo(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


def _registry(state_dir: Path | None, config: Path | None) -> Registry:
    from .devices import Registry

    return Registry(_state(state_dir, config))


def create_key(
    name: Annotated[str, typer.Argument(help="what the key is called in lists")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="what it may do: chat, completions, responses, embeddings, files, vector_stores, devices (name one "
            "in paceline.device); give it once for each; default: all"
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="the device that joins its answers; default: none but one that a request names")
    ] = None,
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


def list_keys(state_dir: StateDir = None, config: Config = None, as_json: Json = False) -> None:
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


def revoke_key(
    name: Annotated[str, typer.Argument(help="its name, or its prefix, as `paceline keys list` shows them")],
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Refuse a key from the next request on. Answers that are being written end as they would have."""
    if not _keys(state_dir, config).revoke(name):
        raise ConfigError(f"There is no key {name} that could be revoked; see `paceline keys list`.")
    typer.echo(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


def _keys(state_dir: Path | None, config: Path | None) -> Keys:
    from .keys import Keys

    return Keys(_state(state_dir, config))


def _state(state_dir: Path | None, config: Path | None) -> Path | Home:
    """Where the server keeps devices and keys."""
    settings = settings_of("cloud", config, state_dir=state_dir)
    assert isinstance(settings, ServerSettings)
    return opened_database(settings) or settings.state_dir


def copy_state(
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="the database, empty; default: PACELINE_DATABASE or the file's")
    ] = None,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Copy a stopped server's state directory into a database, for several servers: all of it or nothing."""
    settings = settings_of("cloud", config, state_dir=state_dir, database=to)
    assert isinstance(settings, ServerSettings)
    with ExitStack() as opened:
        if (database := opened_database(settings)) is None:
            raise ConfigError("There is no database to copy into: give its URL with --to.")
        opened.callback(database.close)
        from .database import copy

        copied = copy(settings.state_dir, database, settings.docs_dir)
        if as_json:
            typer.echo(json.dumps({"copied": copied}))
            return
        for table, count in copied.items():
            typer.echo(f"{table:<24} {count}")
        typer.echo(f"{database.name} has them.", err=True)


def _shared_database(settings: NodeSettings) -> Callable[[], Found] | None:
    if not isinstance(settings, ServerSettings) or settings.database is None:
        return None
    url = settings.database

    def looked() -> Found:
        from .database import look  # with psycopg

        return look(url)

    return looked
