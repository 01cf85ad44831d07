"""From a model's scores to `Dist`. The only place where tensors become distributions."""

from __future__ import annotations

import torch

from paceline.core.sampling.dist import Dist


def dists(logits: torch.Tensor) -> tuple[Dist, ...]:
    """logits: (rows, vocab), any float dtype. Dense distributions at temperature 1; the softmax is torch's."""
    scores = logits.float()
    norms = torch.logsumexp(scores, dim=-1).tolist()
    probs = torch.softmax(scores, dim=-1).double().cpu().numpy()
    return tuple(Dist.dense(row, norm) for row, norm in zip(probs, norms, strict=True))
