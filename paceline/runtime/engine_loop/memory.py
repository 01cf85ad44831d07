"""KV rows that an answer may need, its claim. Pure.

An answer whose claim fits into memory alone can always finish, since others are preempted for it
(`core.batching.scheduler.MemoryAdmission`); so no other is accepted. Nothing is reserved. A claim covers all branches
together: prompts, output tokens, and open rows of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RequestError
from paceline.strategies.base import Branch
from paceline.strategies.decoding.branch_decoder import MAX_OPEN_ROWS

LONG_ANSWER = 256  # output tokens: from this limit on, drafts are worth more than further tokens


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    rows: int  # of all branches together, in whole blocks; 0 where memory has no bound
    tokens: int  # output tokens that fit in them
    drafts: bool  # whether open rows of drafts fit, too


def claim(capacity: int | None, block_size: int, prompts: Sequence[int], tokens: int) -> MemoryClaim | None:
    """Claim of branches for `tokens` output tokens, or for as many as fit; None if not even one fits.

    capacity: rows of the engine, None without a bound. prompts: rows of each branch's prompt. tokens: at least 1.
    """
    if capacity is None:
        return MemoryClaim(0, tokens, drafts=True)
    for open_rows in (MAX_OPEN_ROWS, 0):
        fixed = sum(prompt + open_rows + block_size - 1 for prompt in prompts)  # the last block may be partly filled
        fitting = min(tokens, (capacity - fixed) // len(prompts))
        least = min(tokens, LONG_ANSWER) if open_rows else 1
        if fitting >= least:
            return MemoryClaim(fixed + fitting * len(prompts), fitting, drafts=open_rows > 0)
    return None


def claim_or_refuse(capacity: int | None, block_size: int, branches: Sequence[Branch], tokens: int) -> MemoryClaim:
    """Claim of an answer of these branches. Raises RequestError (400) where its prompts alone do not fit."""
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
