"""The mean of readers that went on from one another: `python -m lab.training.reading.mean --out FILE A B`.

Legs of a run read one set better and another worse; their mean reads both about as well as the better one (Wortsman et
al. 2022, "Model soups"). Only for weights of one ancestor.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def mean(files: Sequence[Path]) -> dict[str, Tensor]:
    """In fp16. Raises ValueError for files that do not hold the same tensors."""
    readers = [load_file(file) for file in files]
    shapes = [{name: value.shape for name, value in reader.items()} for reader in readers]
    if any(each != shapes[0] for each in shapes):
        raise ValueError("these files do not hold weights of the same shape")
    return {name: torch.stack([each[name].float() for each in readers]).mean(0).half() for name in readers[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    save_file(mean(args.files), args.out)


if __name__ == "__main__":
    main()
