"""Sums of what several engines have done. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from paceline.runtime.service import Load

_COUNTED: Final = ("steps", "rows", "cached_rows", "preemptions")  # since the start; never fewer
_HELD: Final = ("answers", "waiting")


def total(first: Load, others: Iterable[Load]) -> Load:
    """Of all engines; links are the first's, and memory has no bound where one engine's has none."""
    loads = (first, *others)
    counts = {name: sum(getattr(load, name) for load in loads) for name in (*_COUNTED, *_HELD)}
    return replace(
        first,
        **counts,
        kv_rows=_bounded(load.kv_rows for load in loads),
        kv_free_rows=_bounded(load.kv_free_rows for load in loads),
    )


def _bounded(rows: Iterable[int | None]) -> int | None:
    known = list(rows)
    return None if None in known else sum(each for each in known if each is not None)


def ended(load: Load) -> Load:
    """What stays counted of an engine that is no more."""
    return Load(**{name: getattr(load, name) for name in _COUNTED}, kv_rows=0, kv_free_rows=0)
