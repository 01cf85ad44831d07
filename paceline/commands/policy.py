"""`paceline policy`: documents that the rules ask their owner for, confirmed or revoked in a side's state directory.

A running program knows it at its next search. Whoever may write the state directory may do this, and nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.docs import Documents
from paceline.commands.groups import group_of
from paceline.commands.options import Json, Where, opened_database, spread, write_json
from paceline.core.printable import printable
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.rag.store.readable import RuledDocument
    from paceline.runtime.policy import PolicyState

Name = Annotated[
    str, typer.Argument(help="of a document, or a pattern for names, as `paceline policy list` shows them")
]


DEVICE = Where("device")


def register(app: typer.Typer) -> None:
    """Add to the group of `paceline policy check`, which the client has, or begin it."""
    group = group_of(app, "policy", "Documents that rules ask for.", "paceline policy list --json")
    group.command("list", epilog="Example: paceline policy list --json")(spread(list_))
    group.command(epilog="Example: paceline policy allow diary.md")(spread(allow))
    group.command(epilog="Example: paceline policy revoke diary.md")(spread(revoke))


def list_(where: Where = DEVICE, as_json: Json = False) -> None:
    """List the documents that answers read once they are confirmed, and those with another rule."""
    with _documents(where) as (found, state):
        confirmed = state.confirmed()
        waiting = {each.id for each in found if each.is_asked_for and state.mark(each.identity) not in confirmed}
    if as_json:
        write_json(
            [
                {"id": each.id, "document": each.name, "rules": [*map(str, each.rules)], "waits": each.id in waiting}
                for each in found
            ]
        )
        return
    for each in found:
        told = ", ".join(map(str, each.rules))
        typer.echo(printable(f"{'waits' if each.id in waiting else 'is read':<8} {each.name}  ({told})"))
    if not found:
        typer.echo("no document has a rule: see [policy] of the settings", err=True)


def allow(name: Name, where: Where = DEVICE, as_json: Json = False) -> None:
    """Confirm documents that are to be asked for: answers read them from now on."""
    _change(name, where, confirmed=True, as_json=as_json)


def revoke(name: Name, where: Where = DEVICE, as_json: Json = False) -> None:
    """Have documents asked for again. What was written from them is not taken back."""
    _change(name, where, confirmed=False, as_json=as_json)


def _change(name: str, where: Where, *, confirmed: bool, as_json: bool) -> None:
    with _documents(where) as (found, state):
        asked = [each for each in found if each.is_asked_for]
        named = [each for each in asked if name in (each.id, each.name)]
        named = named or [each for each in asked if fnmatchcase(each.name, name)]
        if not named:
            raise ConfigError(f"No document that is to be asked for is called {name}: see `paceline policy list`.")
        for each in named:
            state.confirm(each, confirmed=confirmed)
    did, names = "confirmed" if confirmed else "revoked", [each.name for each in named]
    if as_json:
        write_json({did: names})
        return
    for each_name in names:
        typer.echo(printable(f"{did}  {each_name}"))


@contextmanager
def _documents(where: Where) -> Iterator[tuple[list[RuledDocument], PolicyState]]:
    """Documents with a rule, by name."""
    from paceline.rag.store.readable import RuledDocuments
    from paceline.runtime.policy import PolicyState

    settings = where.settings
    documents = Documents(where.side, state_dir=where.state_dir, config=where.config)
    with ExitStack() as opened_here:
        if (database := opened_database(settings)) is not None:
            opened_here.callback(database.close)
        store = opened_here.enter_context(documents.opened())
        state = opened_here.enter_context(closing(PolicyState(database or settings.state_dir)))
        known = RuledDocuments(store, settings.policy.policy()).known().by_id.values()
        yield sorted((each for each in known if each.rules), key=lambda each: each.name), state
