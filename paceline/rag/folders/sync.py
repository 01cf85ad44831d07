"""Synchronising: the documents of a folder become those of its files, new, changed, moved and deleted ones.

Not handled: files deleted from a folder that is gone or has no file left, since an unmounted disk looks the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.rag.folders.matching import is_below
from paceline.rag.parsing.folders import find_files
from paceline.rag.records import Document, IngestResult, Progress, Zone
from paceline.rag.store.documents import DocumentStore


def sync_folders(
    store: DocumentStore,
    paths: Iterable[Path],
    *,
    zone: Zone,
    read_all: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
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
    gone = [document for folder in folders for document in _documents_below(store, folder) if _is_gone(document.source)]
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
    where = os.path.realpath(folder)
    return [document for document in store.documents() if is_below(document, [where])]


def _is_gone(source: str) -> bool:
    """True if nothing has this path any more. False for a path that is not shown whole, and where that cannot be
    seen."""
    if "\ufffd" in source:
        return False
    try:
        os.lstat(source)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
