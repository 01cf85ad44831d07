"""Finding documents as people name them: by name or id, by a pattern with wildcards, or by the folder of their files.

Pure, but for relative paths, which begin at the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from paceline.rag.records import Document

_WILDCARDS = frozenset("*?[")


def matching(documents: Iterable[Document], wanted: str) -> list[Document]:
    """The documents that `wanted` names: by id or name, else as a pattern for names or, with a `/`, for the paths of
    files, else as a folder of names or files. As in a shell, `*` stands for any characters but `/`.
    """
    known = list(documents) if wanted else []
    named = [document for document in known if wanted in (document.id, document.name)]
    if named:
        return named
    if _WILDCARDS & set(wanted):
        path = os.path.join(os.path.realpath(os.curdir), wanted)
        return [
            document
            for document in known
            if _fits(document.name, wanted) or ("/" in wanted and _fits(document.source, path))
        ]
    folder = wanted.rstrip("/") + "/"
    path = wanted if "\0" in wanted else os.path.realpath(wanted)
    return [document for document in known if document.name.startswith(folder) or is_below(document, [path])]


def is_below(document: Document, folders: Sequence[str]) -> bool:
    """True if a document was read from one of these files, or from a file below one of these folders."""
    return any(document.source == folder or document.source.startswith(folder.rstrip("/") + "/") for folder in folders)


def _fits(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
