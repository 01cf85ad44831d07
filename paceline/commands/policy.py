"""`paceline policy`: documents that the rules ask their owner for, confirmed or revoked in a side's state directory.

A running program knows it at its next search. Whoever may write the state directory may do this, and nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.docs import Side, opened
from paceline.commands.options import Config, Json, StateDir, settings_of
from paceline.core.printable import printable, printable_json
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.rag.store.readable import RuledDocument
    from paceline.runtime.policy import PolicyState

Name = Annotated[
    str, typer.Argument(help="of a document, or a pattern for names, as `paceline policy list` shows them")
]


def register(app: typer.Typer) -> None:
    """Add to the group of `paceline policy check`, which the client has, or begin it."""
    groups = (each.typer_instance for each in app.registered_groups if each.name == "policy")
    group = next(filter(None, groups), None)
    if group is None:
        group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Documents that rules ask for.")
        app.add_typer(group, name="policy")
    group.command("list", epilog="Example: paceline policy list --json")(list_)
    group.command(epilog="Example: paceline policy allow diary.md")(allow)
    group.command(epilog="Example: paceline policy revoke diary.md")(revoke)


def list_(side: Side = "device", state_dir: StateDir = None, config: Config = None, as_json: Json = False) -> None:
    """List the documents that answers read once they are confirmed, and those with another rule."""
    with _documents(side, state_dir, config) as (found, state):
        confirmed = state.confirmed()
        waiting = {each.id for each in found if each.is_asked_for and state.mark(each.identity) not in confirmed}
    if as_json:
        rows = [
            {"id": each.id, "document": each.name, "rules": [*map(str, each.rules)], "waits": each.id in waiting}
            for each in found
        ]
        typer.echo(printable_json(json.dumps(rows, indent=2, ensure_ascii=False)))
        return
    for each in found:
        told = ", ".join(map(str, each.rules))
        typer.echo(printable(f"{'waits' if each.id in waiting else 'is read':<8} {each.name}  ({told})"))
    if not found:
        typer.echo("no document has a rule: see [policy] of the settings", err=True)


def allow(
    name: Name, side: Side = "device", state_dir: StateDir = None, config: Config = None, as_json: Json = False
) -> None:
    """Confirm documents that are to be asked for: answers read them from now on."""
    _change(name, side, state_dir, config, confirmed=True, as_json=as_json)


def revoke(
    name: Name, side: Side = "device", state_dir: StateDir = None, config: Config = None, as_json: Json = False
) -> None:
    """Have documents asked for again. What was written from them is not taken back."""
    _change(name, side, state_dir, config, confirmed=False, as_json=as_json)


def _change(
    name: str, side: Side, state_dir: Path | None, config: Path | None, *, confirmed: bool, as_json: bool
) -> None:
    with _documents(side, state_dir, config) as (found, state):
        asked = [each for each in found if each.is_asked_for]
        named = [each for each in asked if name in (each.id, each.name)]
        named = named or [each for each in asked if fnmatchcase(each.name, name)]
        if not named:
            raise ConfigError(f"No document that is to be asked for is called {name}: see `paceline policy list`.")
        for each in named:
            state.confirm(each, confirmed=confirmed)
    did, names = "confirmed" if confirmed else "revoked", [each.name for each in named]
    if as_json:
        typer.echo(printable_json(json.dumps({did: names}, ensure_ascii=False)))
        return
    for each_name in names:
        typer.echo(printable(f"{did}  {each_name}"))


@contextmanager
def _documents(
    side: Side, state_dir: Path | None, config: Path | None
) -> Iterator[tuple[list[RuledDocument], PolicyState]]:
    """Documents with a rule, by name."""
    from paceline.rag.store.readable import RuledDocuments
    from paceline.runtime.policy import PolicyState

    settings = settings_of(side, config, state_dir=state_dir)
    with opened(side, None, None, config, state_dir) as store, closing(PolicyState(settings.state_dir)) as state:
        known = RuledDocuments(store, settings.policy.policy()).known().by_id.values()
        yield sorted((each for each in known if each.rules), key=lambda each: each.name), state
