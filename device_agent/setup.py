"""`paceline setup` and `paceline join`: a file of settings from four questions, and enrolment from one line.

The line is what `paceline invite` prints at a server: its address, `#`, and a one-time code by which each side gets to
know the other's key. The unit of a service is written here too, for whichever program was set up.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.commands.docs import Documents, add
from paceline.commands.options import StateDir, path
from paceline.core.side import Side
from paceline.errors import ConfigError
from paceline.secret_files import given_secret, make_folder, write_private
from paceline.settings import AgentSettings, ServerSettings, variable
from paceline.settings_sources import DEFAULT_FILE, resolve

from .activity import ask_owner

Config = Annotated[
    Path | None, typer.Option("--config", parser=path, help="the file of settings; default: paceline.toml")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="allow an unencrypted link, in a network of your own")]
PROGRAMS: dict[Side, tuple[str, str]] = {"cloud": ("server", "serve"), "device": ("agent", "agent")}
UNIT = """\
# Paceline of one user, written by `paceline setup`. See docs/deployment.md.
[Unit]
Description=Paceline {table}

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5
TimeoutStopSec=45
LimitNOFILE=8192
UMask=0077
NoNewPrivileges=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictRealtime=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
SystemCallErrorNumber=EPERM

[Install]
WantedBy=default.target
"""


def join(
    invitation: Annotated[str, typer.Argument(help="what `paceline invite` printed; -: asked for, or standard input")],
    config: Config = None,
    insecure: Insecure = False,
    state_dir: StateDir = None,
) -> None:
    """Enrol this device at the server that invited it, and have `paceline agent` link to it from now on."""
    file = _file(config)
    line = given_secret("invitation", invitation, None) or ""
    if not line.partition("#")[2].strip(" '"):
        raise ConfigError(f"{line[:80]!r} is no invitation: give the whole line that `paceline invite` printed.")
    _keep(file, "device", _enrolled(line, file, insecure=insecure, state_dir=state_dir))
    typer.echo(f"Start it: {_start('device', file)}", err=True)


def setup(
    side: Annotated[
        Literal["server", "device"] | None, typer.Option("--side", help="which program this machine runs")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="as of `paceline serve` and `paceline agent`")] = None,
    folder: Annotated[str | None, typer.Option("--folder", help="documents to read; empty: none")] = None,
    cloud: Annotated[
        str | None,
        typer.Option(
            "--cloud",
            help="of a device: an invitation, or its server's URL, empty: it answers alone; of a server: the URL by "
            "which devices reach it",
        ),
    ] = None,
    service: Annotated[bool, typer.Option("--service", help="write a unit for systemd too, of this user")] = False,
    config: Config = None,
    insecure: Insecure = False,
    state_dir: StateDir = None,
) -> None:
    """Ask four questions, write the answers to a new file of settings, and read the documents. Options answer ahead."""
    file = _file(config)
    if file.exists():
        raise ConfigError(f"{file} exists, and is not written over: edit it, or name another with --config.")
    known: Side = "cloud" if (side or _asked("server or device", "device", _program)) == "server" else "device"
    chosen = model or _asked("model (a Hugging Face name, a folder or GGUF file)", "demo")
    documents = _asked("folder with documents (empty: none)", "", _there) if folder is None else _there(folder)
    whose = "invitation of a server" if known == "device" else "URL by which devices reach it"
    address = _asked(f"{whose} (empty: none)") if cloud is None else cloud
    values: dict[str, str | bool] = {"model": chosen}
    if address and known == "device":
        values |= _enrolled(address, file, insecure=insecure, state_dir=state_dir)
    elif address:
        values["public_url"] = address
    if state_dir is not None:
        values["state_dir"] = str(state_dir.absolute())
    _keep(file, known, values)
    typer.echo(f"written: {file}. Start it: {_start(known, file)}", err=True)
    if service:
        typer.echo(f"Or always: systemctl --user enable --now {_write_unit(known, file)}", err=True)
    if documents:
        add([Path(documents).expanduser()], where=Documents(known, config=file))


def unit(side: Side, file: Path) -> str:
    """The unit of a program with this file of settings."""
    table, command = PROGRAMS[side]
    words = (sys.executable, "-m", "paceline", command, "--config", str(file.absolute()))
    quoted = (word if re.fullmatch(r"[\w./-]+", word) else json.dumps(word, ensure_ascii=False) for word in words)
    return UNIT.format(table=table, command=" ".join(quoted).replace("%", "%%").replace("$", "$$"))


def _write_unit(side: Side, file: Path) -> str:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"
    name = f"paceline-{PROGRAMS[side][0]}"
    try:
        make_folder(folder)
        (folder / f"{name}.service").write_text(unit(side, file), "utf-8")
    except OSError as error:
        raise ConfigError(f"The unit cannot be written in {folder}: {error.strerror}.") from None
    return name


def _file(config: Path | None) -> Path:
    return (config or Path(os.environ.get(variable("config")) or DEFAULT_FILE)).expanduser()


def _start(side: Side, file: Path) -> str:
    named = "" if file == DEFAULT_FILE else f" --config {file}"
    return f"paceline {PROGRAMS[side][1]}{named}"


def _asked(what: str, default: str = "", read: Callable[[str], str] = str.strip) -> str:
    """read: of the answer; it is asked for again where that raises BadParameter."""
    return str(typer.prompt(what, default=default, value_proc=read, show_default=bool(default), err=True))


def _program(answer: str) -> str:
    for name in ("server", "device"):
        if answer.strip().lower() in (name, name[0]):
            return name
    raise typer.BadParameter("answer server or device")


def _there(answer: str) -> str:
    """The path of documents; empty: none."""
    if (text := answer.strip()) and not Path(text).expanduser().exists():
        raise typer.BadParameter(f"{text} does not exist")
    return text


def _keep(file: Path, side: Side, values: Mapping[str, str | bool]) -> None:
    """Put values into the program's table of the file. Raises ConfigError, and then leaves what was there."""
    table = f"[{PROGRAMS[side][0]}]"
    before = file.read_text("utf-8") if file.exists() else None
    text = f"{before.rstrip()}\n" if before and before.strip() else ""
    written = text.splitlines(keepends=True)
    place = next((at for at, line in enumerate(written, 1) if line.partition("#")[0].strip() == table), None)
    head, rest = ("".join(written[:place]), "".join(written[place:])) if place else (f"{text}{table}\n", "")
    lines = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    try:
        make_folder(file.absolute().parent)
        write_private(file, f"{head}{lines}{rest}".encode())
        resolve(ServerSettings if side == "cloud" else AgentSettings, {}, os.environ, file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}.") from None
    except ConfigError:
        file.unlink() if before is None else write_private(file, before.encode())
        raise


def _enrolled(invitation: str, file: Path, *, insecure: bool, state_dir: Path | None) -> dict[str, str | bool]:
    """Enrol by an invitation, or take a URL as it is. Gives what the file is to say of it and does not yet."""
    import asyncio

    from .cloud import Credentials, exchange, http_url

    url, _, code = invitation.strip().removeprefix("paceline join ").strip("'").partition("#")
    if not url.strip(" ,'"):
        raise ConfigError("The invitation names no server: give the whole line that `paceline invite` printed.")
    known = file if file.exists() else Path(os.devnull)
    flags = {"cloud": url, "insecure": insecure or None, "code": code or None, "state_dir": state_dir}
    settings, _ = resolve(AgentSettings, flags, os.environ, known)
    before, origins = resolve(AgentSettings, {}, os.environ, known)
    assert settings.cloud is not None, "it was given"
    if before.cloud not in (None, settings.cloud):
        raise ConfigError(f"cloud is {before.cloud} already ({origins['cloud']}): change that first.")
    if code:
        credential = asyncio.run(exchange(http_url(settings.clouds[0]), code))
        Credentials(settings.state_dir).put(http_url(settings.clouds[0]), credential)
        typer.echo(f"enrolled at {settings.cloud} as {credential.device}", err=True)
        ask_owner(settings)
    values: dict[str, str | bool] = {
        "cloud": settings.cloud,
        "insecure": settings.insecure,
        "state_dir": str(settings.state_dir),
    }
    had = {"cloud": before.cloud, "insecure": before.insecure, "state_dir": str(before.state_dir)}
    return {key: value for key, value in values.items() if value != had[key]}
