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
    """The documents that `wanted` names: one by its id or name, else those that match it as a pattern, by their name or
    the path of their file, else those whose name or file is below it as a folder. `*` matches any characters, `/` too.
    """
    known = list(documents)
    named = [document for document in known if wanted in (document.id, document.name)]
    if named:
        return named
    path = os.path.realpath(wanted) if "\0" not in wanted else wanted
    if _WILDCARDS & set(wanted):
        here = os.path.join(os.path.realpath(os.curdir), wanted)
        return [
            document
            for document in known
            if fnmatchcase(document.name, wanted) or any(fnmatchcase(document.source, each) for each in (wanted, here))
        ]
    folder = wanted.rstrip("/") + "/"
    return [document for document in known if document.name.startswith(folder) or is_below(document, [path])]


def is_below(document: Document, folders: Sequence[str]) -> bool:
    """True if a document was read from one of these files, or from a file below one of these folders."""
    return any(document.source == folder or document.source.startswith(folder.rstrip("/") + "/") for folder in folders)
