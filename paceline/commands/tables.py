"""`paceline tables`: the look-up tables that answers are drafted from, with the same settings as a side's program.

A running program reads the base table when it starts, and checks for erased owners at each of their requests.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from paceline.commands.options import Json, Where, group_of, show, spread
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.runtime.lookup_tables import TableFile

NO_KEY: Final = "(no key)"  # the owner of requests without one
CLOUD: Final = Where("cloud")


def register(app: typer.Typer) -> None:
    told = "Warm up, list and erase the look-up tables that answers are drafted from."
    group = group_of(app, "tables", told, "paceline tables list --side cloud")
    example = "Example: paceline tables warm dialogues.jsonl --model demo-causal --side cloud"
    group.command(epilog=example)(spread(warm))
    group.command("list", epilog="Example: paceline tables list --json")(spread(list_))
    group.command(epilog="Example: paceline tables erase phone --side cloud")(spread(erase))


def warm(
    file: Annotated[Path, typer.Argument(help='JSON lines with "messages", "turns" or "conversations"; also .gz')],
    model: Annotated[str | None, typer.Option("--model", help="default: that of the side's settings")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="read of each dialogue at most")] = 2048,
    answer_tokens: Annotated[
        int, typer.Option(min=0, help="written by the model where a dialogue lacks an answer")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="dialogues at most")] = None,
    where: Where = CLOUD,
    as_json: Json = False,
) -> None:
    """Let the model read dialogues, so that the first answers are drafted as well as later ones.

    What it learns is read for every owner, by all models of the same vocabulary: give no private text.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    from paceline.model_opening import open_model
    from paceline.models import shipped
    from paceline.runtime import lookup_tables

    settings = where.settings(model=model)
    if not file.is_file():
        raise ConfigError(f"{file} is not a file: give JSON lines with dialogues")
    folder = settings.state_dir / lookup_tables.FOLDER
    dialogues = list(islice(lookup_tables.read_dialogues(file), limit))
    loaded = open_model(settings, shipped(settings.side))
    store = lookup_tables.TableStore(folder, loaded.tokenizer.fingerprint, loaded.tokenizer.vocab_size)
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        read = bar.track(dialogues, description="reading")
        tokens = lookup_tables.warm(loaded, store.base, read, max_tokens=max_tokens, answer_tokens=answer_tokens)
    if not store.save_base():
        raise ConfigError(f"the table cannot be written to {folder}: is there room, and may you write there?")
    read_all, known = len(dialogues), len(store.base)
    line = f"{read_all} dialogues, {tokens} tokens: the table knows what follows {known} tokens"
    show({"dialogues": read_all, "tokens": tokens, "followed": known}, line, as_json=as_json)


def list_(where: Where = CLOUD, as_json: Json = False) -> None:
    """List the tables: bases first, then those of owners."""
    from paceline.runtime.lookup_tables import FOLDER, table_files

    files = table_files(where.settings().state_dir / FOLDER)
    lines = [
        f"{_name(each):<24} {each.rows:>8} rows {each.num_bytes / 1e6:>8.1f} MB  vocabulary {each.vocabulary[:12]}"
        for each in files
    ]
    number = f"{len(files)} table{'' if len(files) == 1 else 's'}"
    show([each._asdict() for each in files], *lines, beside=number, as_json=as_json)


def erase(
    owners: Annotated[list[str] | None, typer.Argument(help="as `paceline tables list` shows them")] = None,
    every: Annotated[bool, typer.Option("--all", help="those of all owners")] = False,
    base: Annotated[bool, typer.Option("--base", help="the bases")] = False,
    where: Where = CLOUD,
    as_json: Json = False,
) -> None:
    """Erase tables, of every vocabulary. Exit code 1 if one of the owners had none on disk.

    A running program forgets what it holds of them too, as soon as they ask again, and at the latest when it ends.
    """
    from paceline.runtime.lookup_tables import FOLDER, mark_erased, remove_table, table_files

    if not (owners or every or base):
        raise ConfigError("name the owners whose tables are to be erased, or give --all or --base")
    folder = where.settings().state_dir / FOLDER
    files = table_files(folder)
    for owner in [None] if every else owners or ():
        mark_erased(folder, "" if owner == NO_KEY else owner)
    erased = dict.fromkeys(owners or (), False)
    for each in files:
        name = _name(each)
        if (each.kind == "base" and base) or (each.kind == "owner" and (every or name in erased)):
            remove_table(each.path)
            erased[name] = True
    show(erased, *(f"{'erased' if gone else 'not there'}  {name}" for name, gone in erased.items()), as_json=as_json)
    if not all(erased.values()):
        raise typer.Exit(1)


def _name(table: TableFile) -> str:
    """By which a table is listed and erased."""
    return "(base)" if table.kind == "base" else table.owner or NO_KEY
