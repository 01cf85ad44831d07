"""Average the weights of models that went on from one another: `python -m lab.training.average --out DIR
MODEL...`.

Legs of one training run end on different sides of the same valley; their mean lies deeper in it than any of them
(Wortsman et al. 2022, "Model soups"). Only for models of one shape and one ancestor: means of strangers are noise.
"""

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor

from lab.training.architecture import load_model, save_model


def average(out: Path, models: list[Path]) -> None:
    """Write the models' mean with the first one's tokenizer. Raises ValueError for models of different shapes."""
    readers = [load_model(model) for model in models]
    shape = readers[0].shape
    if any(reader.shape != shape for reader in readers):
        raise ValueError("these models have different shapes: no mean of theirs means anything")
    states = [dict(reader.state_dict()) for reader in readers]
    mean: dict[str, Tensor] = {
        name: torch.stack([state[name].float() for state in states]).mean(dim=0) for name in states[0]
    }
    save_model(out, shape, mean)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models[0] / file, out / file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("models", type=Path, nargs="+")
    args = parser.parse_args()
    average(args.out, args.models)


if __name__ == "__main__":
    main()
