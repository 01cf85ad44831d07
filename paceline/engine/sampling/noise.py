"""The common noise of `core.sampling.dist` as tensors, on a model's device.

On the CPU it is numpy's, which takes half of torch's time; elsewhere the same hash in torch's int64 arithmetic, equal
bit for bit. Logarithms may differ from numpy's in their last bit, so who decides by this noise leaves a margin.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampling import dist
from paceline.core.sampling.dist import GROUP
from paceline.engine.sampling.workspace import is_remote


class GroupNoise:
    """The noise of some positions, by groups of ids."""

    def __init__(self, keys: Tensor, num_groups: int) -> None:
        """keys: (rows,) int64, `dist.row_keys`."""
        self._keys = keys
        self._hashes = _group_hashes(keys[:, None], torch.arange(num_groups, device=keys.device))
        self.least = _exponentials(self._hashes) / GROUP  # (rows, groups) the least exp(-G) of each

    def gumbel(self, groups: Tensor, rows: Tensor) -> Tensor:
        """(some, n) groups of these rows → (some, n * GROUP) Gumbel noise of their ids, float64."""
        place = torch.arange(GROUP, device=groups.device)
        ids = groups[:, :, None] * GROUP + place
        own = _exponentials(_mixed(ids * _signed(dist.GAMMA) + self._keys[rows][:, None, None]))
        hashes, least = (each[rows[:, None], groups][:, :, None] for each in (self._hashes, self.least))
        x = torch.where(hashes & (GROUP - 1) == place, least, least + own)
        return -torch.log(x).flatten(1)


def _group_hashes(keys: Tensor, groups: Tensor) -> Tensor:
    return _mixed((groups + dist.FIRST_GROUP) * _signed(dist.GAMMA) + keys)


def _mixed(counters: Tensor) -> Tensor:
    """The hash of counters, both int64 in place of uint64."""
    if counters.device.type == "cpu":
        return torch.from_numpy(dist.mixed(counters.numpy().view(np.uint64)).view(np.int64))
    return mixed_by_torch(counters)


def _exponentials(hashes: Tensor) -> Tensor:
    if hashes.device.type == "cpu":
        return torch.from_numpy(-np.log(dist.uniforms(hashes.numpy().view(np.uint64))))
    return exponentials_by_torch(hashes)


def mixed_by_torch(z: Tensor) -> Tensor:
    """SplitMix64's finaliser. int64 multiplication wraps around as that of uint64 does."""
    z = (z ^ _shifted(z, 30)) * _signed(dist.FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(dist.SECOND)
    return z ^ _shifted(z, 31)


def exponentials_by_torch(hashes: Tensor) -> Tensor:
    return -torch.log((_shifted(hashes, 12).double() + 0.5) * dist.STEP)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned number: torch repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


# How near two values must be for rounding to decide between them, beside `row_kernel.MARGIN`.


DISTINCT = 1e-5  # nats: logits that differ by more have different probabilities in float32
UNDERFLOW = 80.0  # nats below the best: probabilities in float32 may be 0 there


def may_revive(plain: Tensor, scores: Tensor, best: Tensor) -> Tensor:
    """(rows,) True where an id may be chosen to which the reference, by its model's own probability in float32, gives
    none. plain, scores: (rows, vocab) before and after changes. best: (rows, 1) the model's own largest logits."""
    floor = best - UNDERFLOW
    if not is_remote(plain.device) and bool((plain.amin(1, keepdim=True) >= floor).all()):
        return torch.zeros(len(plain), dtype=torch.bool, device=plain.device)
    lost = scores.masked_fill(plain >= floor, -torch.inf).amax(1)
    top = scores.amax(1)
    return (lost > top - UNDERFLOW) | (top == -torch.inf)
