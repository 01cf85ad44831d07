"""Weights that are kept once: what has been packed leaves the memory that the weight files are mapped into.

Tensors of a safetensors file share one mapping, which stays as long as one of them is used. Packing has read all of it,
so the whole file would stay resident beside the packed copies. Afterwards only the input embedding is used from it: the
other tensors are copied out, and the mapping's pages are given back. Rows of the embedding come in again from the
system's page cache as tokens need them, each with its neighbours, so that a few thousand would bring all of it: they
are given back again and again. Linux only; elsewhere, and for weights that were converted while they were read, nothing
is done.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path

import torch
from torch import nn

from paceline.engine.heap import trim_heap

log = logging.getLogger("paceline.engine")

_MAPS = Path("/proc/self/smaps")
_KEPT_ROWS = 64  # of an embedding that are read before its pages are given back: some 4 to 16 MiB


def release_mapped_weights(model: nn.Module) -> int:
    """Copy small tensors out of mapped files, give the pages of the files back; returns how many bytes of mappings."""
    ranges = _mapped_files()
    if not ranges:
        return 0
    embeddings = {module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if _range_of(tensor, ranges) is not None and tensor.data_ptr() not in embeddings:
                tensor.data = tensor.detach().clone()
        for name, value in list(vars(module).items()):  # tensors that fused modules have taken over
            if isinstance(value, torch.Tensor) and _range_of(value, ranges) is not None:
                setattr(module, name, value.clone())
    given = sum(_give_back(first, stop) for first, stop in ranges)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and (found := _range_of(module.weight, ranges)) is not None:
            module.register_forward_hook(_PagesOfEmbedding(*found))
    trim_heap()
    return given


class _PagesOfEmbedding:
    """A hook of an embedding in a mapped file: gives the pages back that its rows have brought in."""

    def __init__(self, first: int, stop: int) -> None:
        self._range, self._rows = (first, stop), 0

    def __call__(self, _module: nn.Module, _args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._rows += output.shape[:-1].numel()
        if self._rows >= _KEPT_ROWS:
            self._rows = 0
            _give_back(*self._range)


def _mapped_files() -> list[tuple[int, int]]:
    """Address ranges of safetensors files mapped into this process, of whose pages none has been written.

    A written page is this process's own, and would be lost: giving it back brings the file's contents again.
    """
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    ranges: list[tuple[int, int]] = []
    found: tuple[int, int] | None = None
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "Anonymous:" and found is not None:
            if rest.split()[0] == "0":
                ranges.append(found)
            found = None
        elif not name.endswith(":"):  # the next mapping
            first, _, stop = name.partition("-")
            found = (int(first, 16), int(stop, 16)) if line.endswith(".safetensors") else None
    return ranges


def _range_of(tensor: torch.Tensor, ranges: list[tuple[int, int]]) -> tuple[int, int] | None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:  # packed weights have no address
        return None
    address = tensor.data_ptr()
    return next((each for each in ranges if each[0] <= address < each[1]), None)


def _give_back(first: int, stop: int) -> int:
    """Drop the pages of a mapped file from this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), mmap.MADV_DONTNEED):
        log.debug("memory of weights could not be given back: error %d", ctypes.get_errno())
        return 0
    return stop - first
