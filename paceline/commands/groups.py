"""Groups of subcommands and checks of `doctor`: several programs add to them, and none imports another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import typer

from paceline.settings import NodeSettings

# ok: as it should be. warn: works, with the drawback that the sentence names. fail: something will not work, and the
# sentence says what to do.
Status = Literal["ok", "warn", "fail"]
Found = tuple[Status, str]
NodeChecks = dict[str, Callable[[NodeSettings], Callable[[], Found] | None]]
"""By name: a check of the settings of one side; None for settings that it is not about."""


@dataclass(frozen=True, slots=True)
class ProgramContext:
    checks: NodeChecks = field(default_factory=dict)


def doctor_checks(app: typer.Typer) -> NodeChecks:
    """Checks of `paceline doctor` besides its own. An app without that command, of one program alone, keeps them for
    nobody."""
    added = (app.info.context_settings or {}).get("obj", ProgramContext())
    assert isinstance(added, ProgramContext), "nothing else is the object of the root's context"
    return added.checks


def group_of(app: typer.Typer, name: str, help: str, example: str) -> typer.Typer:
    """The group of this name, made now if another program has not made it."""
    for known in app.registered_groups:
        if known.name == name and known.typer_instance is not None:
            return known.typer_instance
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=help, epilog=f"Example: {example}")
    group.callback()(lambda: None)  # a group of one command is a group
    app.add_typer(group, name=name)
    return group


def devices_group(app: typer.Typer) -> typer.Typer:
    """The group `paceline devices`: a server's devices, and at a device what its cloud has asked."""
    told = (
        "At a server: add, list and revoke the devices that may link to it. At a device: show what the cloud's clients "
        "have asked it."
    )
    return group_of(app, "devices", told, "paceline devices add phone")
