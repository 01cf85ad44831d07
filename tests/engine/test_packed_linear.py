"""Packed linears compute few row counts, and what a plain linear does at all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.engine.paged.packed_linear import PackedLinear, can_pack, padded_rows

STEP = 512  # rows of a step by default


def test_few_row_counts_are_computed_and_none_is_padded_by_more_than_an_eighth() -> None:
    counts = [padded_rows(rows) for rows in range(1, STEP + 1)]
    assert len(set(counts)) == 56, "code is generated and kept for each"
    assert all(rows <= count <= rows * 1.125 for rows, count in enumerate(counts, 1))
    assert counts[:16] == list(range(1, 17)), "small steps are not padded"
    assert counts == [padded_rows(count) for count in counts]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_padding_changes_no_row(leading: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(3)
    plain = nn.Linear(48, 40, bias=has_bias)
    weight, bias = plain.weight.detach(), None if plain.bias is None else plain.bias.detach()
    if not can_pack(weight):
        pytest.skip("this machine has no packed kernel")
    packed = PackedLinear(weight, bias)
    with torch.inference_mode():
        for rows in (1, 8, 9, 17, 31, 32, 33, 100):
            x = torch.randn(*leading, rows, 48)
            found = packed(x)
            assert found.shape == (*leading, rows, 40)
            torch.testing.assert_close(found, functional.linear(x, weight, bias), atol=1e-5, rtol=1e-4)
