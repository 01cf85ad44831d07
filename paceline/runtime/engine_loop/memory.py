"""How much of the engine's memory an answer claims, so that whatever has begun can end. Pure.

The scheduler admits an answer's rows only while every answer that has begun can still be given all it claims
(`core.batching.scheduler`). A claim is for all branches together: prompts, output tokens, and the open rows of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RequestError
from paceline.strategies.base import Branch
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS

MANY = 256  # output tokens: an answer that may be so long is better off with drafts than with more tokens


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    rows: int  # of all branches together, in whole blocks; 0 where memory has no bound
    tokens: int  # output tokens that fit in them
    drafts: bool  # do drafts fit, too?


def claim(capacity: int | None, block_size: int, prompts: Sequence[int], tokens: int) -> MemoryClaim | None:
    """What branches with prompts of so many rows claim for `tokens` output tokens, at least 1, or for as many as fit.

    capacity: rows of the engine, None without a bound. None: not even one token fits.
    """
    if capacity is None:
        return MemoryClaim(0, tokens, drafts=True)
    for open_rows in (MAX_OPEN_ROWS, 0):
        fixed = sum(prompt + open_rows + block_size - 1 for prompt in prompts)  # the last block may be begun only
        fitting = min(tokens, (capacity - fixed) // len(prompts))
        least = min(tokens, MANY) if open_rows else 1
        if fitting >= least:
            return MemoryClaim(fixed + fitting * len(prompts), fitting, drafts=open_rows > 0)
    return None


def claim_or_refuse(capacity: int | None, block_size: int, branches: Sequence[Branch], tokens: int) -> MemoryClaim:
    """What an answer of these branches claims. Raises RequestError (400) where its prompts alone do not fit."""
    prompts = [len(branch.prompt) for branch in branches]
    share = claim(capacity, block_size, prompts, tokens)
    if share is None:
        raise RequestError(
            f"This server has memory for {capacity} tokens, and the prompt with its {len(prompts)} documents takes "
            f"{sum(prompts)}. Please shorten the messages, or ask for fewer documents.",
            code="context_length_exceeded",
            param="messages",
        )
    return share
