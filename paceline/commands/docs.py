"""`paceline docs`: the documents of one side, with the same settings as that side's program; and `paceline policy`:
those that the rules ask their owner for, confirmed or revoked in a side's state directory.

Works on the store's files, or on the database of the servers, so it needs no running program; a running one sees the
change at its next search. Sends a device's documents nowhere: they stay on the machine the command runs on. Whoever may
write the state directory may confirm documents, and nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from paceline.commands.options import Json, Where, group_of, opened_database, path, show, spread
from paceline.core.printable import is_text, printable, printable_lines
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.rag.records import IngestResult
    from paceline.rag.store.documents import DocumentStore
    from paceline.rag.store.readable import RuledDocument
    from paceline.runtime.policy import PolicyState


@dataclass(frozen=True)
class Documents(Where):
    """The store that a side's program would open."""

    side: Annotated[
        Literal["cloud", "device"],
        typer.Option("--side", help="cloud: public documents; device: private ones, which stay on this machine"),
    ] = "device"
    store: Annotated[
        Path | None,
        typer.Option(
            "--docs-dir",
            "--store",
            parser=path,
            help="folder of the documents; default: docs in the state directory",
        ),
    ] = None
    embedder: Annotated[
        str | None, typer.Option("--embedder", help="minilm, hash, or a name; default: that of the side's settings")
    ] = None

    @contextmanager
    def opened(self, *, again: bool = False, embeds: bool = True) -> Iterator[DocumentStore]:
        from paceline.rag.embedder import load_embedder  # imported here, so that `paceline --help` stays fast
        from paceline.rag.store.documents import DocumentStore

        settings = self.settings(docs_dir=self.store, embedder=self.embedder)
        if settings.docs_dir.exists() and not settings.docs_dir.is_dir():
            raise ConfigError(f"{settings.docs_dir} is not a folder: give the folder of the documents with --docs-dir")
        embed_with = load_embedder(settings.embedder)
        with ExitStack() as opened_here:
            database = None if self.store else opened_database(settings)  # a folder that is named is meant
            if database is not None:
                opened_here.callback(database.close)
            yield opened_here.enter_context(
                DocumentStore.open(
                    settings.docs_dir,
                    embed_with,
                    side=self.side,
                    reindex=again,
                    embeds=embeds,
                    encrypt=settings.encrypt_documents,
                    home=database,
                )
            )


DEVICES = Documents()


def register(app: typer.Typer) -> None:
    told = "Add, list, search and remove the documents of a side."
    group = group_of(app, "docs", told, "paceline docs add notes/ --side device")
    group.command(epilog="Example: paceline docs add notes/ --sync --side device")(spread(add))
    group.command("list", epilog="Example: paceline docs list --side cloud --json")(spread(list_))
    group.command(epilog='Example: paceline docs search "when does the museum open" --side cloud')(spread(search))
    group.command(epilog="Example: paceline docs remove report.md 'notes/*' --side device")(spread(remove))
    group.command(epilog="Example: paceline docs reindex --side cloud --embedder minilm")(spread(reindex))
    # Beside `paceline policy check`, which the client has.
    rules = group_of(app, "policy", "Documents that rules ask for.", "paceline policy list --json")
    rules.command("list", epilog="Example: paceline policy list --json")(spread(list_rules))
    rules.command(epilog="Example: paceline policy allow diary.md")(spread(allow))
    rules.command(epilog="Example: paceline policy revoke diary.md")(spread(revoke))


def add(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="text, Markdown, PDF, HTML, office files, mail, calendars, CSV, JSON, XML, notebooks and code files, "
            "or folders of them"
        ),
    ],
    sync: Annotated[
        bool, typer.Option("--sync", help="of folders: documents whose files are gone from there are removed too")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="go on as --sync whenever files change, until Ctrl-C")] = False,
    check_contents: Annotated[
        bool,
        typer.Option(
            "--check-contents",
            help="read files also that have the size, inode and times with which they were read before; default: they "
            "count as unchanged",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="with --sync: list unchanged and skipped files too, not only changes")
    ] = False,
    where: Documents = DEVICES,
    as_json: Json = False,
) -> None:
    """Read files into the store. The same text again changes nothing; a file that has changed replaces its document.

    What cannot be read keeps nothing else from being read: it is listed at the end, and the exit code is 1.
    """
    from paceline.rag.folders import changes

    _tell_links(paths)
    with where.opened() as documents:
        for number, _ in enumerate(changes(_folders(paths)) if watch else [None]):
            try:
                results = add_with_progress(
                    documents, paths, where.side, sync=sync or watch, read_all=check_contents and not number
                )
            except ConfigError as error:  # such as a folder without its last file, while that is being replaced
                if not number:
                    raise
                typer.echo(f"paceline: {error}", err=True)
                continue
            changed = [result for result in results if result.status not in ("unchanged", "duplicate", "skipped")]
            show_all = not number and (verbose or as_json or not (sync or watch))
            _show_results(results if show_all else changed, as_json=as_json)
            if (sync or watch) and not number and not as_json:
                _show_sum(results)
    failed = [result for result in results if result.status == "failed"]
    if failed and not watch:
        typer.echo(f"{_counted(len(failed), 'file')} could not be read, see above", err=True)
        raise typer.Exit(1)


def _folders(paths: list[Path]) -> list[Path]:
    """The paths to watch. Raises ConfigError for one that is no folder."""
    for folder in paths:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; only folders can be watched")
    return paths


def _show_results(results: list[IngestResult], *, as_json: bool) -> None:
    results = sorted(results, key=lambda result: result.status == "failed")
    lines = []
    for result in results:
        size = f", {_counted(result.num_chunks, 'chunk')}" if result.num_chunks else ""
        note = f" ({result.note})" if result.note else ""
        lines.append(printable(f"{result.status:<9} {result.name}{size}{note}"))
    show(results, *lines, as_json=as_json)


def _show_sum(results: list[IngestResult]) -> None:
    counts = Counter[str](result.status for result in results)
    order = ("added", "replaced", "moved", "removed", "unchanged", "duplicate", "skipped", "failed")
    typer.echo(", ".join(f"{counts[status]} {status}" for status in order if counts[status]) or "no files")


def list_(where: Documents = DEVICES, as_json: Json = False) -> None:
    """List the documents, by name."""
    with where.opened(embeds=False) as documents:
        rows = documents.documents()
    lines = [printable(f"{row.id}  {_counted(row.num_chunks, 'chunk'):>10}  {row.name}") for row in rows]
    show(rows, *lines, beside=_counted(len(rows), "document"), as_json=as_json)


def search(
    query: Annotated[str, typer.Argument(help="what to look for, in words")],
    k: Annotated[int, typer.Option("-k", min=1, help="passages at most")] = 4,
    where: Documents = DEVICES,
    as_json: Json = False,
) -> None:
    """Show the passages an answer to the query would read, best first, with their scores."""
    if not is_text(query):
        raise ConfigError("The query has bytes that are no UTF-8: write it in that encoding.")
    with where.opened() as documents:
        passages = documents.search(query, k)
    lines = []
    for passage in passages:
        place = f", {passage.place}" if passage.place else ""
        lines.append(f"{passage.score:.3f}  {printable(passage.document + place)}")
        lines += printable_lines("\n".join(f"       {line}" for line in passage.text.strip().splitlines())).split("\n")
    none = "" if passages else "nothing is similar enough, and nothing has the words"
    show(passages, *lines, beside=none, as_json=as_json)


def remove(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="names or ids as `paceline docs list` shows them, patterns such as 'notes*', or folders"),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="remove all documents of the side")] = False,
    where: Documents = DEVICES,
    as_json: Json = False,
) -> None:
    """Remove documents; their text and vectors leave the files. Exit code 1 if one of them was not there."""
    from paceline.rag.folders import matching

    if every == bool(names):
        raise ConfigError("Give names of documents to remove, or --all alone")
    with where.opened(embeds=False) as documents:
        known = documents.documents()
        found = {name: matching(known, name) for name in names or ()} or {"all documents": known}
        documents.remove(*{document.id for each in found.values() for document in each})
    removed = {name: len(each) for name, each in found.items()}
    lines = []
    for name, number in removed.items():
        many = f" ({_counted(number, 'document')})" if number > 1 else ""
        lines.append(printable(f"{'removed' if number or every else 'not there'}  {name}{many}"))
    show(removed, *lines, as_json=as_json)
    if not every and not all(removed.values()):
        raise typer.Exit(1)


def reindex(where: Documents = DEVICES, as_json: Json = False) -> None:
    """Embed every chunk again: after another embedder was chosen."""
    with where.opened(again=True) as documents:
        number = documents.count()
    show({"documents": number}, f"{_counted(number, 'document')} indexed again", as_json=as_json)


def add_with_progress(
    store: DocumentStore,
    paths: Iterable[Path],
    side: Literal["cloud", "device"],
    *,
    sync: bool = False,
    read_all: bool = False,
) -> list[IngestResult]:
    """Add files, with one progress bar for all of them if stderr is a terminal. read_all: see `DocumentStore.add`.

    Raises ConfigError where there is nothing to read and nothing to synchronise.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    from paceline.rag.folders import sync_folders
    from paceline.rag.parsing.kinds import NAMED_KINDS

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)

        def update(name: str, file: int, num_files: int) -> None:
            bar.update(task, total=num_files, completed=file, description=printable(name))

        if sync:
            return sync_folders(store, paths, zone=side, read_all=read_all, progress=update)
        results = store.add(paths, zone=side, read_all=read_all, progress=update)
    if all(result.status == "skipped" for result in results):
        raise ConfigError(f"Nothing to read there: give files of {NAMED_KINDS}, or folders of them.")
    return results


def _tell_links(paths: Iterable[Path]) -> None:
    """Say which names no rule of `[policy]` goes by: documents are known by their real paths."""
    for given in paths:
        if lost := sorted({*given.absolute().parts} - {*given.resolve().parts} - {".."}):
            leads = (
                f"{given} leads to {given.resolve()}, so rules of [policy] hold nothing by the name {', '.join(lost)}"
            )
            typer.echo(printable(f"paceline: {leads}."), err=True)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# ---- `paceline policy`: documents that rules ask for -----------------------------------------------------------------
Name = Annotated[
    str, typer.Argument(help="of a document, or a pattern for names, as `paceline policy list` shows them")
]


DEVICE = Where("device")


def list_rules(where: Where = DEVICE, as_json: Json = False) -> None:
    """List the documents that answers read once they are confirmed, and those with another rule."""
    with _ruled_documents(where) as (found, state):
        confirmed = state.confirmed()
        waiting = {each.id for each in found if each.is_asked_for and state.mark(each.identity) not in confirmed}
    documents, lines = [], []
    for each in found:
        rules, waits = [*map(str, each.rules)], each.id in waiting
        documents.append({"id": each.id, "document": each.name, "rules": rules, "waits": waits})
        lines.append(printable(f"{'waits' if waits else 'is read':<8} {each.name}  ({', '.join(rules)})"))
    none = "" if found else "no document has a rule: see [policy] of the settings"
    show(documents, *lines, beside=none, as_json=as_json)


def allow(name: Name, where: Where = DEVICE, as_json: Json = False) -> None:
    """Confirm documents that are to be asked for: answers read them from now on."""
    _confirm(name, where, confirmed=True, as_json=as_json)


def revoke(name: Name, where: Where = DEVICE, as_json: Json = False) -> None:
    """Have documents asked for again. What was written from them is not taken back."""
    _confirm(name, where, confirmed=False, as_json=as_json)


def _confirm(name: str, where: Where, *, confirmed: bool, as_json: bool) -> None:
    with _ruled_documents(where) as (found, state):
        asked = [each for each in found if each.is_asked_for]
        named = [each for each in asked if name in (each.id, each.name)]
        named = named or [each for each in asked if fnmatchcase(each.name, name)]
        if not named:
            raise ConfigError(f"No document that is to be asked for is called {name}: see `paceline policy list`.")
        for each in named:
            state.confirm(each, confirmed=confirmed)
    did, names = "confirmed" if confirmed else "revoked", [each.name for each in named]
    show({did: names}, *(printable(f"{did}  {each}") for each in names), as_json=as_json)


@contextmanager
def _ruled_documents(where: Where) -> Iterator[tuple[list[RuledDocument], PolicyState]]:
    """Documents with a rule, by name."""
    from paceline.rag.store.readable import RuledDocuments
    from paceline.runtime.policy import PolicyState

    settings, documents = where.settings(), Documents(where.side, where.state_dir, where.config)
    with ExitStack() as opened_here:
        if (database := opened_database(settings)) is not None:
            opened_here.callback(database.close)
        store = opened_here.enter_context(documents.opened(embeds=False))
        state = opened_here.enter_context(closing(PolicyState(database or settings.state_dir)))
        known = RuledDocuments(store, settings.policy.policy()).known().by_id.values()
        yield sorted((each for each in known if each.rules), key=lambda each: each.name), state
