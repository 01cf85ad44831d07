"""The kernel of decoder layers against torch in float64. Inside a layer: the engines' laws, with it and without."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from paceline.engine.paged import layer_kernel

pytestmark = pytest.mark.usefixtures("with_kernel")

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 16, 30, 896]
ROWS = [1, 5, 40]  # 40: more than one piece of work


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this thread alone, and with others as large work has them."""
    if request.param > 1:
        monkeypatch.setattr(layer_kernel, "_threads", lambda *_: request.param)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding to the number format. expected: float64"""
    unit = 2**-8 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=unit)


def norm_of(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x.double(), weight.shape, weight.double(), eps)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "rows", "width"), [*itertools.product(DTYPES, ROWS, WIDTHS)])
def test_a_norm_and_the_addition_before_it(dtype: torch.dtype, rows: int, width: int) -> None:
    x, added, weight = (
        drawn(rows, width, dtype=dtype),
        drawn(rows, width, dtype=dtype, seed=1),
        drawn(width, dtype=dtype),
    )
    same(layer_kernel.norm(x, weight, 1e-5), norm_of(x, weight, 1e-5))
    total, normed = layer_kernel.add_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x + added), "rounded as torch rounds it"
    same(normed, norm_of(total, weight, 1e-5))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "rows", "width"), [*itertools.product(DTYPES, ROWS, WIDTHS)])
def test_the_gate_of_an_mlp(dtype: torch.dtype, rows: int, width: int) -> None:
    x = drawn(rows, 2 * width, dtype=dtype) * 8  # far into both ends of the sigmoid
    gates, values = x.double().chunk(2, dim=-1)
    same(layer_kernel.gate(x), functional.silu(gates) * values)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "rows", "dim"), [*itertools.product(DTYPES, ROWS, [2, 24, 64])])
def test_rotary_embedding_in_place_of_the_first_heads_alone(dtype: torch.dtype, rows: int, dim: int) -> None:
    x, cos, sin = drawn(rows, 5, dim, dtype=dtype), drawn(rows, dim, dtype=dtype, seed=1), drawn(rows, dim, dtype=dtype)
    expected = x.double()
    expected[:, :3] = expected[:, :3] * cos[:, None] + expected[:, :3].roll(dim // 2, -1) * sin[:, None]
    layer_kernel.rotate_(x, 3, cos, sin)
    unit = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(x.double(), expected, atol=20 * unit, rtol=unit)  # differences of products up to 80
    assert torch.equal(x[:, 3:], drawn(rows, 5, dim, dtype=dtype)[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_stays_none_and_in_its_row(dtype: torch.dtype) -> None:
    x, weight = drawn(3, 40, dtype=dtype), torch.ones(40, dtype=dtype)
    x[1, 7] = torch.nan
    assert layer_kernel.norm(x, weight, 1e-5).isnan().any(1).tolist() == [False, True, False]
    assert layer_kernel.gate(x).isnan().sum() == 1


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_to_the_bit_whatever_else_is_in_the_step(dtype: torch.dtype) -> None:
    x, weight = drawn(40, 96, dtype=dtype), drawn(96, dtype=dtype)
    assert torch.equal(layer_kernel.norm(x, weight, 1e-5)[17:18], layer_kernel.norm(x[17:18], weight, 1e-5))
    assert torch.equal(layer_kernel.gate(x)[17:18], layer_kernel.gate(x[17:18]))
