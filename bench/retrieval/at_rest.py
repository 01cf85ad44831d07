"""The cost of encrypting a document store: ingest and search of the same texts, plain and encrypted in turns.

    python -m bench.retrieval.at_rest [--rounds 9] [--documents 40] [--embedder minilm]

A round adds the texts to a fresh store of each kind and searches it, in alternating order, in one process. Figures are
ratios of processor time within rounds, encrypted ÷ plain: the median, and the interval of nine tenths of the medians of
resampled rounds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from paceline.rag.embedder import Embedder, load_embedder
from paceline.rag.store.documents import DocumentStore

SENTENCES = 60  # of a document
QUERIES = 60
LIMIT = 1.05  # asked: under 5 %
PARTS = ("ingest", "search", "first search")


def texts(count: int, rng: random.Random) -> list[str]:
    """Made-up documents of distinct words."""
    words = [f"{rng.choice('bdfgklmnprstvz')}{rng.choice('aeiou')}{rng.choice('lmnrst')}{i}" for i in range(2000)]
    return [
        " ".join(f"{' '.join(rng.choices(words, k=12)).capitalize()}." for _ in range(SENTENCES)) for _ in range(count)
    ]


def measured(folder: Path, embedder: Embedder, documents: Sequence[str], *, encrypt: bool) -> tuple[float, ...]:
    """Processor seconds of PARTS. The first search is that of a program that has just been started."""
    with DocumentStore.open(folder, embedder, encrypt=encrypt) as store:
        began = time.process_time()
        for i, text in enumerate(documents):
            store.add_text(f"{i}.txt", text, zone="device")
        ingest = time.process_time() - began
        queries = [" ".join(documents[i % len(documents)].split()[i : i + 8]) for i in range(QUERIES)]
        store.search(queries[0], 4)
        began = time.process_time()
        for query in queries:
            store.search(query, 4, min_score=-1.0)
        search = time.process_time() - began
    began = time.process_time()
    with DocumentStore.open(folder, embedder, encrypt=encrypt) as store:
        store.search(queries[0], 4)
    return ingest, search, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--embedder", default="minilm")
    options = parser.parse_args()
    rng = random.Random(7)
    embedder = load_embedder(options.embedder)
    documents = texts(options.documents, rng)
    rounds: list[dict[bool, tuple[float, ...]]] = []
    for number in range(options.rounds + 1):
        times = {}
        for encrypt in (False, True) if number % 2 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                times[encrypt] = measured(Path(folder) / "docs", embedder, documents, encrypt=encrypt)
        if number:  # the first one warms up
            rounds.append(times)
    for part, name in enumerate(PARTS):
        ratios = [each[True][part] / each[False][part] for each in rounds]
        medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
        plain = median(each[False][part] for each in rounds)
        print(  # noqa: T201
            f"{name:<13} {median(ratios):.3f} ({medians[100]:.3f} to {medians[-101]:.3f}) x plain, "
            f"which took {plain:.3f} s; {'holds' if median(ratios) < LIMIT else 'MISSED'} under {LIMIT}"
        )


if __name__ == "__main__":
    main()
