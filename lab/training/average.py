"""Average the weights of models that went on from one another: `python -m lab.training.average --out FILE FILE...`.

Legs of one training run end on different sides of the same valley; their mean lies deeper in it than any of them
(Wortsman et al. 2022, "Model soups"). Only for models of one shape and one ancestor: means of strangers are noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def average(files: Sequence[Path]) -> dict[str, Tensor]:
    """In the number format of the first. Raises ValueError for files that do not hold the same tensors."""
    models = [load_file(file) for file in files]
    shapes = [{name: value.shape for name, value in model.items()} for model in models]
    if any(each != shapes[0] for each in shapes):
        raise ValueError("these files do not hold weights of the same shape: no mean of theirs means anything")
    return {
        name: torch.stack([model[name].float() for model in models]).mean(0).to(value.dtype)
        for name, value in models[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    save_file(average(args.files), args.out, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
