"""Shapes of `aggregate`'s drafts that DRAGON's evaluation compares, as options and in a request's `paceline.debug`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from paceline.wire.options import DraftLimits

Shape = Literal["tree", "chain", "sequence", "none"]
SHAPES: Final[Mapping[Shape, DraftLimits]] = {
    "tree": DraftLimits(),
    "chain": DraftLimits(width=1, rows=1),  # DRAGON as published
    "sequence": DraftLimits(width=1, rows=1, ahead=20, whole_sequences=True),
    "none": DraftLimits(width=1, rows=1, ahead=0),  # token by token
}


def shaped(shape: Shape, **more: object) -> dict[str, object]:
    """The field `paceline.debug` of a request with drafts of this shape, and more options."""
    return {"debug": {"drafting": msgspec.to_builtins(SHAPES[shape])} | more}
