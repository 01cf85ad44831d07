"""Folders and what was read from them: found by name, kept in step with the files, watched for changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePath

from watchfiles import Change, watch

from paceline.errors import ConfigError
from paceline.rag.parsing.folders import find_files, is_gone, readable
from paceline.rag.parsing.kinds import kind_of
from paceline.rag.records import Document, FilesProgress, IngestResult, Zone
from paceline.rag.store.documents import DocumentStore

# Finding documents as people name them: by name or id, by a pattern with wildcards, or by the folder of their files.
# Relative paths begin at the working directory.


_WILDCARDS = frozenset("*?[")


def matching(documents: Iterable[Document], wanted: str) -> list[Document]:
    """The documents that `wanted` names: by id or name, else as a pattern for names or, with a `/`, for the paths of
    files, else as a folder of names or files. As in a shell, `*` stands for any characters but `/`.
    """
    known = list(documents) if wanted else []
    shown = readable(wanted)
    named = [document for document in known if shown in (document.id, document.name)]
    if named:
        return named
    if _WILDCARDS & set(shown):
        path = os.path.normpath(os.path.join(escape(readable(os.path.realpath(os.curdir))), shown))
        return [
            document
            for document in known
            if _fits(document.name, shown) or ("/" in shown and _fits(document.source, path))
        ]
    folder = shown.rstrip("/") + "/"
    path = shown if "\0" in shown else readable(os.path.realpath(wanted))
    return [document for document in known if document.name.startswith(folder) or is_below(document, [path])]


def is_below(document: Document, folders: Sequence[str]) -> bool:
    """True if a document was read from one of these files, or from a file below one of these folders."""
    return any(document.source == folder or document.source.startswith(folder.rstrip("/") + "/") for folder in folders)


def _fits(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


# Synchronising: the documents of a folder become those of its files, new, changed, moved and deleted ones.
#
# Not handled: files deleted from a folder that is gone or has no file left, since an unmounted disk looks the same.


def sync_folders(
    store: DocumentStore,
    paths: Iterable[Path],
    *,
    zone: Zone,
    read_all: bool = False,
    progress: FilesProgress = lambda *_: None,
) -> list[IngestResult]:
    """Add what `DocumentStore.add` adds, then remove the documents whose files are not below these folders any more.

    read_all: see there. Documents stay whose files are there and cannot be read now. Raises ConfigError for a path that
    is no folder, and for one whose files are all gone.
    """
    folders = list(paths)
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; only folders can be synchronised. Nothing was changed.")
        _check_not_emptied(store, folder)
    results = store.add(folders, zone=zone, read_all=read_all, progress=progress)
    gone = [document for folder in folders for document in _documents_below(store, folder) if is_gone(document.source)]
    if gone:
        store.remove(*(document.id for document in gone))
    removed = (IngestResult(document.name, "removed", document.id, note="its file is gone") for document in gone)
    return [*results, *removed]


def _check_not_emptied(store: DocumentStore, folder: Path) -> None:
    files, _ = find_files([folder])
    known = [] if files else _documents_below(store, folder)
    if known:
        raise ConfigError(
            f"{folder} has no file left, and {len(known)} documents were read from there. If that was meant: paceline "
            f"docs remove {folder}. Else see whether the folder is mounted. Nothing was changed."
        )


def _documents_below(store: DocumentStore, folder: Path) -> list[Document]:
    where = readable(os.path.realpath(folder))
    return [document for document in store.documents() if is_below(document, [where])]


# Waiting for changes below folders, by watchfiles: notifications of the operating system, or polling without them.
#
# Says only that something has changed: what, `sync` finds out.


_QUIET_MS = 200  # without a change, after which what was changed is taken as complete
_LONGEST_MS = 1600  # that changes are collected for, so that a copied folder is read at once
_LOOK_MS = 500  # between looks at `stop`


def changes(folders: Sequence[Path], stop: threading.Event | None = None) -> Iterator[None]:
    """Yields at first, when changes from then on are noticed, after changes, and when another folder has taken a path;
    ends with `stop` or an interrupt."""
    while True:
        watched, is_first, gone = _identities(folders), True, False
        for found in watch(
            *folders, watch_filter=_is_read, debounce=_LONGEST_MS, step=_QUIET_MS, stop_event=stop,
            rust_timeout=_LOOK_MS, yield_on_timeout=True, raise_interrupt=False,
        ):  # fmt: skip
            if found or is_first:
                is_first = False
                yield
            now = _identities(folders)
            gone = (
                gone or None in now or any(change == Change.deleted and Path(path) in folders for change, path in found)
            )
            if None not in now and (gone or now != watched):
                break  # the folders that are watched are no longer those of these paths
        else:
            return


def _identities(folders: Iterable[Path]) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for folder in folders:
        try:
            status = folder.stat()
            found.append((status.st_dev, status.st_ino))
        except OSError:
            found.append(None)
    return found


def _is_read(change: Change, path: str) -> bool:
    """Files of the kinds that are read, and folders; of what is gone all may have been one, but for a database, where
    a store lies in a watched folder."""
    name = PurePath(path)
    if name.name.startswith("."):
        return False
    if kind_of(name.name) is not None or not name.suffix:
        return True
    return not name.suffix.startswith(".sqlite") if change == Change.deleted else os.path.isdir(path)
