"""A step's sampling looks at the device once, as an engine on a GPU would wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from paceline.core.sampling.sampler import RowSampling, SamplingParams, sample_row
from paceline.engine.sampling import batch_sampler, open_sampler, workspace
from paceline.engine.sampling.batch_sampler import BatchSampler
from paceline.engine.sampling.workspace import to_host
from paceline.engine.tensors import dists
from tests.engine.sampling.test_batch_sampler import peaked

VOCAB = 3000
LOOKS = {"tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class Looks(TorchFunctionMode):
    """Every call that reads a tensor's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in LOOKS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors of each copy; the logits count as a GPU's."""
    seen: list[int] = []

    def counted(tensors: Sequence[torch.Tensor]) -> list[Any]:
        seen.append(len(tensors))
        return to_host(tensors)

    for module in (batch_sampler, open_sampler, workspace):
        monkeypatch.setattr(module, "is_remote", lambda _: True)
    for module in (open_sampler, workspace):
        monkeypatch.setattr(module, "to_host", counted)
    return seen


def row(number: int, params: SamplingParams) -> RowSampling:
    allowed = np.arange(VOCAB) % 2 == 0 if number % 4 == 1 else None
    if allowed is not None:
        allowed.flags.writeable = False  # as masks are that several answers share
    return RowSampling(params, position=number, vocab_size=VOCAB, counts={5: 1}, allowed=allowed, num_top=number % 3)


def test_a_step_of_all_kinds_of_rows_is_one_copy(copies: list[int]) -> None:
    """Rows of likely tokens, which the first look settles."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3, temperature=0.5),
        SamplingParams(seed=4, temperature=0.4, top_p=0.95),
        SamplingParams(seed=5, top_k=20, frequency_penalty=0.4),
        SamplingParams(seed=6, temperature=0.5, min_p=0.05),
    ]
    rows = [row(number, params[number % len(params)]) for number in range(100)]
    logits = torch.from_numpy(peaked(np.random.default_rng(1), (100, VOCAB))).float()
    with Looks() as looks:
        found = BatchSampler().sample(logits, rows)
    assert len(copies) == 1
    assert not looks.names
    expected = [sample_row(dist, each).token for dist, each in zip(dists(logits), rows, strict=True)]
    assert [each.token for each in found] == expected


def test_flat_rows_look_again_and_have_the_tokens_of_the_reference(copies: list[int]) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(40, VOCAB)) * 0.3).float()
    rows = [row(number, SamplingParams(seed=number, top_p=0.6 + 0.01 * number)) for number in range(40)]
    found = BatchSampler().sample(logits, rows)
    assert 1 < len(copies) < 20
    expected = [sample_row(dist, each).token for dist, each in zip(dists(logits), rows, strict=True)]
    assert [each.token for each in found] == expected
