"""Encode the reader's examples for `train`: `python -m lab.training.reading.encode --data DATA --out DIR`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from lab.training.reading.examples import Encoded, Encodings, encode
from lab.training.reading.folders import Folder, asked, folders, varied
from lab.training.reading.sources import draw, mixture
from lab.training.reading.train import BEGUN, FOLDERS, HEAD, HELD_OUT, MIXTURE
from paceline.encoder import WIDTH, WORDS, installed_tokenizer, installed_weights
from paceline.rag.embedder import load_embedder

MIXED: Final = 150_000  # examples of the other sources
EVERY: Final = 20  # of so many folders one is held out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="published question sets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--begun", type=Path, help="weights to begin with, such as the shipped ones")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, embedder, rng = installed_tokenizer(), load_embedder("minilm"), random.Random(1)

    def encoded(found: Sequence[Folder], parts: int | None) -> Iterator[list[Encoded]]:
        """parts: see `varied`; None: the passages as they are."""
        for number, folder in enumerate(found):
            for examples in asked(folder, embedder):
                each = examples if parts is None else varied(rng, examples, parts)
                read = [(example, encode(tokenizer, example)) for example in each]
                yield [ids for example, ids in read if ids.answers or not example.spans]
            sys.stdout.write(f"\r{number + 1} of {len(found)} folders")

    every = folders()
    Encodings.of(encoded([each for i, each in enumerate(every) if i % EVERY], 2)).save(args.out / FOLDERS)
    Encodings.of(encoded(every[::EVERY], None)).save(args.out / HELD_OUT)
    mixed = ([encode(tokenizer, each)] for each in draw(rng, list(mixture(args.data)), MIXED))
    Encodings.of(mixed).save(args.out / MIXTURE)
    begun = {name: torch.from_numpy(each.copy()) for name, each in installed_weights().items() if "pooler" not in name}
    begun[HEAD] = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(5)) * 0.02
    if args.begun is not None:
        begun |= {name: each for name, each in load_file(args.begun).items() if name != WORDS}
    save_file({name: each.half().contiguous() for name, each in begun.items()}, args.out / BEGUN)


if __name__ == "__main__":
    main()
