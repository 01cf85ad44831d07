"""`paceline serve`, `invite`, `devices`, `keys` and `database`.

Registry and keys are imported by the commands that open them: their libraries take longer than other commands do.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.commands.options import (
    AtServer,
    Found,
    Json,
    devices_group,
    doctor_checks,
    group_of,
    opened_database,
    options,
    show,
    spread,
    write_json,
)
from paceline.errors import ConfigError
from paceline.settings import NodeSettings, ServerSettings
from paceline.settings_sources import Origins, describe_given

if TYPE_CHECKING:
    from paceline.sql import Home

    from .devices import Registry
    from .keys import Keys


HERE = AtServer()


def register(app: typer.Typer) -> None:
    example = "Example: paceline serve --model Qwen/Qwen2.5-7B-Instruct"
    app.command(epilog=example)(options(ServerSettings)(serve))
    app.command(epilog="Example: paceline invite phone --url https://example.org")(spread(invite))
    group = devices_group(app)
    group.command("add", epilog="Example: paceline devices add phone")(spread(add_device))
    group.command("list", epilog="Example: paceline devices list --json")(spread(list_devices))
    group.command("revoke", epilog="Example: paceline devices revoke phone")(spread(revoke_device))
    told = "Create, list, extend, rotate and revoke the keys that let applications use this server."
    group = group_of(app, "keys", told, "paceline keys create notebook --scope chat --expires 30")
    example = "Example: paceline keys create notebook --scope chat --scope embeddings"
    group.command("create", epilog=example)(spread(create_key))
    group.command("list", epilog="Example: paceline keys list --json")(spread(list_keys))
    group.command("extend", epilog="Example: paceline keys extend notebook --expires 90")(spread(extend_key))
    group.command("rotate", epilog="Example: paceline keys rotate notebook")(spread(rotate_key))
    group.command("revoke", epilog="Example: paceline keys revoke notebook")(spread(revoke_key))
    example = "paceline database copy --to postgresql://paceline@db/paceline"
    group = group_of(app, "database", "The database that several servers share.", example)
    group.command("copy", epilog=f"Example: {example}")(spread(copy_state))
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
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Make a one-time code that lets one device in under this name. It holds for ten minutes."""
    from .devices import CODE_LIFE_S

    code = _registry(where).add(name, role)
    command = "paceline agent --cloud URL" if role == "device" else "paceline stage --server URL"
    advice = f"At the {role}, within ten minutes: {command} --code -   (it asks for the code)"
    show({"device": name, "code": code, "expires_in_s": CODE_LIFE_S}, code, beside=advice, as_json=as_json)


def invite(
    name: Annotated[str, typer.Argument(help="what the device is called here")],
    url: Annotated[
        str | None,
        typer.Option(
            "--public-url", "--url", help="address by which the device reaches this server; default: public_url"
        ),
    ] = None,
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Print a line that enrols a device, and shows each side the other's key. It holds once, for ten minutes."""
    settings = where.settings(public_url=url)
    address = (settings.public_url or f"http://127.0.0.1:{settings.port}").rstrip("/")
    invitation = f"{address}#{_registry(where).add(name)}"
    if as_json:
        write_json({"device": name, "invitation": invitation})
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


def list_devices(where: AtServer = HERE, as_json: Json = False) -> None:
    """List the devices and whether they may link."""
    devices = _registry(where).devices()
    lines = []
    for device in devices:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(device.since))
        since = "until" if device.state == "waiting" else "since"
        lines.append(f"{device.name:<24} {device.state:<8} {since} {when}{' stage' if device.role == 'stage' else ''}")
    keys = ("state", "since", "role")
    found = [{"device": each.name} | {key: getattr(each, key) for key in keys} for each in devices]
    none = "" if devices else "no devices yet: add one with `paceline devices add NAME`"
    show(found, *lines, beside=none, as_json=as_json)


def revoke_device(
    name: Annotated[str, typer.Argument(help="as `paceline devices list` shows it")],
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Let a device in no more; a link it holds is cut within seconds."""
    _revoke(_registry(where), name, f"There is no device {name}; see `paceline devices list`.", as_json=as_json)


def _revoke(store: Registry | Keys, name: str, otherwise: str, *, as_json: bool) -> None:
    if not store.revoke(name):
        raise ConfigError(otherwise)
    show({"revoked": name}, f"revoked {name}", as_json=as_json)


def _registry(where: AtServer) -> Registry:
    from .devices import Registry

    return Registry(_state(where))


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
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Make a key and show it, this once: only its hash is kept. A running server knows it at once."""
    keys = _keys(where)
    key = keys.create(name, scopes=scope or (), device=device, days=expires)
    _show_key(name, key, as_json=as_json)


def list_keys(where: AtServer = HERE, as_json: Json = False) -> None:
    """List the keys by name and prefix, with what they may do."""
    found = _keys(where).all()
    lines = []
    for key in found:
        until = "" if key.expires_at is None else time.strftime(" until %Y-%m-%d", time.localtime(key.expires_at))
        since = time.strftime("%Y-%m-%d", time.localtime(key.created_at))
        may = "all" if key.scopes is None else ",".join(key.scopes)
        bound = "" if key.device is None else f" device {key.device}"
        lines.append(f"{key.name:<24} {key.prefix}… {key.state:<8} since {since}{until} scopes {may}{bound}")
    none = "" if found else "no keys yet: make one with `paceline keys create NAME`"
    show(found, *lines, beside=none, as_json=as_json)


Named = Annotated[str, typer.Argument(help="its name, or its prefix, as `paceline keys list` shows them")]


def extend_key(
    name: Named,
    expires: Annotated[
        float | None, typer.Option(metavar="DAYS", help="days it holds from now on; default: until revoked")
    ] = None,
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Let a key, also an expired one, hold longer. Its files and conversations stay its own."""
    if not _keys(where).extend(name, expires):
        raise ConfigError(f"There is no key {name} that could be extended; see `paceline keys list`.")
    show({"extended": name}, f"extended {name}", as_json=as_json)


def rotate_key(
    name: Named,
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Put another secret in a key's place and show it, this once. The earlier one is refused from the next request on;
    what the key has made stays its own. A revoked key is valid again by its new secret."""
    key = _keys(where).rotate(name)
    if key is None:
        raise ConfigError(f"There is no key {name} that could be rotated; see `paceline keys list`.")
    _show_key(name, key, as_json=as_json)


def _show_key(name: str, key: str, *, as_json: bool) -> None:
    advice = "Keep it: it is not shown again. Clients send it as `Authorization: Bearer KEY`."
    show({"name": name, "key": key}, key, beside=advice, as_json=as_json)


def revoke_key(
    name: Named,
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Refuse a key from the next request on. Answers that are being written end as they would have."""
    otherwise = f"There is no key {name} that could be revoked; see `paceline keys list`."
    _revoke(_keys(where), name, otherwise, as_json=as_json)


def _keys(where: AtServer) -> Keys:
    from .keys import Keys

    return Keys(_state(where))


def _state(where: AtServer) -> Path | Home:
    """Where the server keeps devices and keys. Raises ConfigError for an agent's state directory, which has none."""
    settings = where.settings()
    if database := opened_database(settings):
        return database
    folder = settings.state_dir
    if (folder / "asking.sqlite").exists() and not (folder / "server-key.pem").exists():
        raise ConfigError(
            f"{folder} is an agent's state directory, and these are kept by a server: an agent takes its keys by "
            "--api-key-file."
        )
    return folder


def copy_state(
    to: Annotated[
        str | None, typer.Option(metavar="URL", help="the database, empty; default: PACELINE_DATABASE or the file's")
    ] = None,
    where: AtServer = HERE,
    as_json: Json = False,
) -> None:
    """Copy a stopped server's state directory into a database, for several servers: all of it or nothing."""
    settings = where.settings(database=to)
    with ExitStack() as opened:
        if (database := opened_database(settings)) is None:
            raise ConfigError("There is no database to copy into: give its URL with --to.")
        opened.callback(database.close)
        from .database import copy

        copied = copy(settings.state_dir, database, settings.docs_dir)
        lines = [f"{table:<24} {count}" for table, count in copied.items()]
        show({"copied": copied}, *lines, beside=f"{database.name} has them.", as_json=as_json)


def _shared_database(settings: NodeSettings) -> Found | None:
    if not isinstance(settings, ServerSettings) or settings.database is None:
        return None
    from .database import look  # with psycopg

    return look(settings.database)
