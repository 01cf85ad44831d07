"""Decoder layers on a CPU, or parts of them, by a kernel in C, where the installation has built it and the processor
runs it.

Each has a twin in torch, which its callers use elsewhere. A row's result has the same bits whatever else is computed
with it, but rows of a tree and of a chain may differ in the last ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.system import free_cores

if TYPE_CHECKING:
    from types import ModuleType

FORMATS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as the kernel numbers them
MOST_DIMS: Final = 256  # of a head
_FLOAT: Final = 4  # bytes
_LINEAR: Final = np.dtype([("parts", "i8"), ("count", "i8"), ("bias", "i8")])
LAYER: Final = np.dtype(  # the kernel's record `Layer`
    [(name, "i8") for name in ("before", "between", "query", "key")]
    + [(name, _LINEAR) for name in ("qkv", "out", "up", "down")]
    + [(name, "i8") for name in ("middle", "index", "window")]
    + [(name, "f4") for name in ("eps", "scale", "softcap")],
    align=True,
)
assert LAYER.itemsize == 168, "the kernel's has as many bytes"
_LOG2_E: Final = 1.4426950408889634


@cache
def kernel() -> ModuleType | None:
    """The module in C, or None where it was not built, or runs on other processors only."""
    try:
        module = import_module("paceline.engine._layer_kernel")
    except ModuleNotFoundError:
        return None
    return module if module.is_supported() and _parallel() and hasattr(module, "layers") else None  # not an older one


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch computes with, so that both have one team of threads, if it is GNU's."""
    for library in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):  # one that is preloaded first
        with suppress(OSError, AttributeError):
            found = ctypes.CDLL(library)
            return found if found.GOMP_parallel and found.omp_set_num_threads else None
    return None


@cache
def _parallel() -> int | None:
    """Address of `GOMP_parallel`, None where there is none."""
    return ctypes.cast(found.GOMP_parallel, ctypes.c_void_p).value if (found := _openmp()) else None


def use_free_cores(most: int) -> None:
    """Have the calling thread compute by so many threads at most, and by fewer while other processes compute. For
    models whose layers are all the kernel's: numbers by torch may depend on the threads."""
    if most > 1 and (openmp := _openmp()):
        openmp.omp_set_num_threads(min(most, free_cores()))


def can_run(tensor: Tensor) -> bool:
    """True if the kernel computes with tensors like this one."""
    return tensor.device.type == "cpu" and tensor.dtype in FORMATS and kernel() is not None


def parts_of(weights: Sequence[Tensor]) -> NDArray[np.int64]:
    """Table of matrices below each other, for `linear`. weights: (out, in) each, in any of `FORMATS`, which must
    stay where they are."""
    assert all(each.is_contiguous() for each in weights)
    return np.array([(_at(each), each.shape[0], FORMATS[each.dtype]) for each in weights], dtype=np.int64)


def linear(x: Tensor, parts: NDArray[np.int64], bias: Tensor | None, y: Tensor, first: int = 0) -> None:
    """y = x W' + b, for the columns of y and b from `first` on that W has outputs for. x: (rows, in), y: (rows, all),
    bias: (all,), all float32 and contiguous; parts: of W"""
    (rows, inputs), wide = x.shape, y.shape[1]
    assert x.dtype == y.dtype == torch.float32
    bias_at = 0 if bias is None else _at(bias) + _FLOAT * first
    where = parts.ctypes.data, parts.shape[0], inputs, _at(x), rows, bias_at, _at(y) + _FLOAT * first, wide
    _module().linear(_parallel(), torch.get_num_threads(), *where)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of each row, or each head of a row. x: (rows, width) or (rows, heads, width), heads beside
    each other."""
    y = x.new_empty(x.shape)
    width, heads = x.shape[-1], x.shape[1] if x.dim() > 2 else 1
    strides = x.stride(0), y.stride(0)
    assert x.dtype == weight.dtype and x.stride()[1:] == ((width, 1) if x.dim() > 2 else (1,)) == y.stride()[1:]
    numbers = _at(x), strides[0], _at(y), strides[1], _at(weight), x.shape[0], heads, width, eps
    _module().norm(*_how(x), *numbers)
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Replace x by x cos + x' sin, x' its halves exchanged. x: (rows, heads, dim), heads beside each other; cos, sin:
    (rows, 1, dim), the first half of sin negated."""
    rows, heads, dim = x.shape
    assert x.stride()[1:] == (dim, 1) and cos.is_contiguous() and sin.is_contiguous()
    assert cos.shape == sin.shape == (rows, 1, dim) and x.dtype == cos.dtype == sin.dtype
    numbers = _at(x), x.stride(0), _at(cos), _at(sin), rows, heads, dim
    _module().turn(*_how(x), *numbers)


def gate(x: Tensor) -> Tensor:
    """silu(a) b of the halves a, b of each row. x: (..., 2 width)"""
    assert x.is_contiguous()
    width = x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    _module().gate(*_how(x), _at(x), _at(y), y.numel() // width, width)
    return y


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    items: Tensor,
    pool: Tensor,
    positions: Tensor,
    *,
    block_size: int,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> None:
    """Write the output of whole tiles. query, output: (rows, heads, dim); keys, values: (slots, kv heads, dim); items,
    pool, positions: as `tile_plan` lays them out."""
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    assert query.dtype == keys.dtype == values.dtype == output.dtype
    tensors = (part for each in (query, keys, values, output) for part in (_at(each), each.stride(0)))
    plan = _at(items), items.shape[0], _at(pool), _at(positions)
    sizes = query.shape[1], keys.shape[1], query.shape[2], values.shape[2], block_size, window or 0
    _module().attend(*_how(query), *tensors, *plan, *sizes, *scales(scale, softcap))


def scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Both as the kernel takes them, whose exponentials are of base 2."""
    return (scale, softcap) if softcap else (scale * _LOG2_E, 0.0)


def layers(
    table: NDArray[np.void],
    hidden: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    items: Tensor,
    pool: Tensor,
    positions: Tensor,
    *,
    heads: int,
    block_size: int,
) -> None:
    """Replace hidden rows by what layers make of them, and store their K and V. All numbers are float32.

    table: a `LAYER` each; hidden: (rows, width); rotary: as `turn` takes them; keys, values: (layers, slots, kv heads,
    dim); slots: (rows,); items, pool, positions: as `tile_plan` lays them out.
    """
    (rows, width), (kv_heads, dim) = hidden.shape, keys.shape[2:]
    room = hidden.new_empty(rows * (width + max(2 * (heads + kv_heads) * dim, 3 * int(table["middle"].max()))))
    numbers = hidden, room, *rotary, keys, values
    assert all(each.dtype == torch.float32 and each.is_contiguous() for each in numbers) and keys.shape == values.shape
    assert rotary[0].shape == rotary[1].shape == (rows, 1, dim) and len(slots) == rows and dim <= MOST_DIMS
    places = map(_at, (*numbers, slots, items, pool, positions))
    sizes = rows, width, keys.stride(0), len(items), heads, kv_heads, dim, block_size
    _module().layers(_parallel(), torch.get_num_threads(), table.ctypes.data, len(table), *places, *sizes)


def _module() -> ModuleType:
    found = kernel()
    assert found is not None, "who calls has asked `can_run`"
    return found


def _how(tensor: Tensor) -> tuple[int | None, int, int]:
    """First arguments of all functions."""
    return _parallel(), torch.get_num_threads(), FORMATS[tensor.dtype]


def _at(tensor: Tensor) -> int:
    """Address of its numbers."""
    assert tensor.device.type == "cpu", "the kernel would read another device's addresses as this one's"
    return tensor.data_ptr()
