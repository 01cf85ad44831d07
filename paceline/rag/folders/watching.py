"""Waiting for changes below folders, by watchfiles: notifications of the operating system, or polling without them.

Says only that something has changed: what, `sync` finds out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from watchfiles import Change, watch

from paceline.rag.parsing.kinds import kind_of

_QUIET_MS = 200  # without a change, after which what was changed is taken as complete
_LONGEST_MS = 1600  # that changes are collected for, so that a copied folder is read at once
_LOOK_MS = 500  # between looks at `stop`


def changes(folders: Sequence[Path], stop: threading.Event | None = None) -> Iterator[None]:
    """Yields at first, when changes from then on are noticed, and after changes; ends with `stop` or an interrupt."""
    is_first = True
    for found in watch(
        *folders, watch_filter=_is_read, debounce=_LONGEST_MS, step=_QUIET_MS, stop_event=stop, rust_timeout=_LOOK_MS,
        yield_on_timeout=True, raise_interrupt=False,
    ):  # fmt: skip
        if found or is_first:
            is_first = False
            yield


def _is_read(change: Change, path: str) -> bool:
    """Files of the kinds that are read, and folders, whose names mostly have no end; so no database is one, where a
    store lies in a watched folder."""
    del change
    name = PurePath(path)
    return not name.name.startswith(".") and (kind_of(name.name) is not None or not name.suffix)
