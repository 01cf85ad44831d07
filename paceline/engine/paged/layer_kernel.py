"""What surrounds the matrix products of a decoder layer, by the kernel in C: norms, rotary embedding and gates.

Where it was not built, on other devices and in other number formats torch does the same in several calls each, as
`packed_linear` chooses. Attention stays torch's, whose matrix products are as fast. Tensors are of a format that `fits` accepts; their rows are
contiguous. The kernel reads and writes where it is told, so every call asserts what it tells.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from paceline.engine import native

FORMATS: Final = {torch.float32: 0, torch.bfloat16: 1}  # and `is_half` of each
_NUMBERS_A_THREAD: Final = 1 << 17  # of a norm or gate: fewer are not worth another thread


def kernel() -> ModuleType | None:
    """The module in C, or None where it was not built."""
    return native.load("paceline.engine.paged._layer_kernel")


def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """True for a device and a number format that the kernel computes with, if there is one."""
    return device.type == "cpu" and dtype in FORMATS and kernel() is not None


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm. x: (rows, width); weight: (width,)"""
    assert x.is_contiguous() and weight.is_contiguous() and weight.shape == x.shape[1:] and weight.dtype == x.dtype
    out = torch.empty_like(x)
    addresses = (x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr())
    _run("norm", (FORMATS[x.dtype], *x.shape, eps, *addresses), _threads(x.numel(), _NUMBERS_A_THREAD))
    return out


def add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added, and its root mean square norm: (rows, width) each, as are both arguments."""
    assert x.is_contiguous() and added.is_contiguous() and added.shape == x.shape
    assert weight.is_contiguous() and weight.shape == x.shape[1:] and weight.dtype == added.dtype == x.dtype
    total, out = torch.empty_like(x), torch.empty_like(x)
    addresses = (x.data_ptr(), added.data_ptr(), weight.data_ptr(), total.data_ptr(), out.data_ptr())
    _run("norm", (FORMATS[x.dtype], *x.shape, eps, *addresses), _threads(x.numel(), _NUMBERS_A_THREAD))
    return total, out


def rotate_(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of the first `heads` heads, in place. x: (rows, all heads, dim); cos, sin: (rows, dim), the
    first half of sin negated."""
    rows, _, dim = x.shape
    assert x.stride()[1:] == (dim, 1) and dim % 2 == 0 and heads <= x.shape[1]
    assert (
        cos.is_contiguous()
        and sin.is_contiguous()
        and cos.shape == sin.shape == (rows, dim)
        and cos.dtype == sin.dtype == x.dtype
    )
    shape = (rows, x.stride(0), heads, dim)
    addresses = (x.data_ptr(), cos.data_ptr(), sin.data_ptr())
    _run("rotate", (FORMATS[x.dtype], *shape, *addresses), _threads(rows * heads * dim, _NUMBERS_A_THREAD))


def gate(x: Tensor) -> Tensor:
    """silu(first half of each row) * second half. x: (rows, 2 * width) -> (rows, width)"""
    assert x.is_contiguous() and x.shape[1] % 2 == 0
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    _run("gate", (FORMATS[x.dtype], rows, width, x.data_ptr(), out.data_ptr()), _threads(x.numel(), _NUMBERS_A_THREAD))
    return out


def _threads(work: int, per_thread: int) -> int:
    return 1 if work < 2 * per_thread else min(torch.get_num_threads(), work // per_thread)


def _run(name: str, arguments: tuple[float, ...], num_threads: int) -> None:
    module = kernel()
    assert module is not None, "`fits` says so"
    function = getattr(module, name)
    if num_threads <= 1:
        function(0, *arguments)
    else:
        native.run(function, arguments, num_threads)
