"""The form that a request asks for, held against tokens that a peer has decided or led to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.strategies.base import MachineConfig

BROKEN_FORM: Final = "it breaks the form that the request asks for"  # the end of a sentence about the peer


def permits(config: MachineConfig, targets: Sequence[int], token: int) -> bool:
    """The request's constraint lets this token follow. Where it lets none follow, the answer ends.

    Of a token that depends on what the peer sent. For the front alone: the peer answers for nothing.
    """
    mask = config.mask if config.faces_client else None
    allowed = None if mask is None else mask.allowed(targets)
    if allowed is None:
        return True
    if not allowed.any():
        return token in config.eos_ids
    return token < len(allowed) and bool(allowed[token])
