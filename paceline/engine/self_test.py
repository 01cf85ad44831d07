"""A short trial at load time: does an engine score a prompt as the model's plain forward does?

Covers a split chain, a tree in two parts with two commits, and a truncation. Sliding windows are covered only where
they are shorter than the prompt, so of the small ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine, ModelInfo

log = logging.getLogger("paceline.engine")

_LONGEST = 40  # tokens: more than the windows of test models, less than a second of a large one
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6, torch.bfloat16: 0.15, torch.float16: 0.05}  # total variation


def prompt_for(windows: Mapping[str, int | None], info: ModelInfo) -> list[int]:
    """Tokens that no one has a meaning for, long enough to leave a small window."""
    longest = max((window for window in windows.values() if window is not None), default=8)
    length = min(max(12, longest + 6), _LONGEST, info.max_positions)
    return [(37 * i * i + 11 * i + 5) % info.vocab_size for i in range(length)]


def agrees(engine: Engine, prompt: Sequence[int], plain: Sequence[Dist], dtype: torch.dtype) -> bool:
    """plain: the distribution after each token of the prompt. The engine's sequences are released again."""
    seq, cut = SeqId(-1), len(prompt) - 4
    a, b, c, d = prompt[cut:]
    try:
        found = list(engine.forward(Batch((Segment(seq, 0, tuple(prompt[: cut - 1]), logits="all"),))).dists[0])
        found += engine.forward(Batch((Segment(seq, cut - 1, (prompt[cut - 1],)),))).dists[0]
        engine.forward(Batch((Segment(seq, cut, (d, c)),)))
        engine.truncate(seq, cut)
        parents = (-1, -1, 1, 1, 3)  # the path is rows 1, 3 and 4, scored in two parts
        found += engine.forward(Batch((Segment(seq, cut, (c, a), parents=parents[:2]),))).dists[0]
        grown = engine.forward(Batch((Segment(seq, cut + 2, (d, b, c), parents=parents, logits="all"),))).dists[0]
        found += grown[1:]
        engine.commit(seq, (1, 3), rest=(4,))
        engine.commit(seq, (0,))
        found += engine.forward(Batch((Segment(seq, cut + 3, (d,)),))).dists[0]
        engine.check()
    except Exception as error:
        # Whatever a foreign architecture raises here is the answer to the question: it cannot be served this way.
        log.debug("self-check of %s: %s", engine.info.name, error)
        return False
    finally:
        engine.release(seq)
    worst = max(float(np.abs(x.probs - y.probs).sum()) / 2 for x, y in zip(found, plain, strict=True))
    log.debug("self-check of %s: total variation %.2g", engine.info.name, worst)
    return worst <= TOLERANCE.get(dtype, 0.15)
