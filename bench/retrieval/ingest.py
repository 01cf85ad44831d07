"""The cost of adding documents: processor time of this process and its parsers, and the room that they take.

    python -m bench.retrieval.ingest [--files 500] [--megabytes 4] [--embedded 60]

Small text files, one long text and two thousand words a file for the default embedder, each from a folder into a fresh
store. The texts are sentences of words that the embedder knows, the frequent ones often, in paragraphs.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path

from paceline.encoder import installed_tokenizer
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore

SMALL = 9  # sentences of a small file: 0.8 kB
LONG = 60  # of a longer one: 5 kB
FIRST, LAST = 1996, 12000  # ids of the vocabulary, in order of how frequent they are


def texts(count: int, sentences: int, rng: random.Random) -> list[str]:
    """Paragraphs of five sentences of 14 words, below a heading."""
    vocabulary = installed_tokenizer()
    known = [word for i in range(FIRST, LAST) if (word := vocabulary.id_to_token(i) or "").isalpha()]
    weights = [1 / rank for rank in range(2, len(known) + 2)]
    made = []
    for number in range(count):
        said = [f"{' '.join(rng.choices(known, weights, k=14)).capitalize()}." for _ in range(sentences)]
        parts = [" ".join(said[i : i + 5]) for i in range(0, sentences, 5)]
        made.append(f"# Notes {number}\n\n" + "\n\n".join(parts) + "\n")
    return made


def processor_s() -> float:
    """Processor time of this process and of those that it has waited for, s."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def room(folder: Path) -> int:
    """Bytes of a store's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def added(name: str, documents: list[str], embedder: str) -> None:
    """Write these texts to a folder, add it, and say what that took."""
    loaded = load_embedder(embedder)
    loaded.embed(["warm"])
    with tempfile.TemporaryDirectory() as made:
        folder, store = Path(made, "files"), Path(made, "store")
        folder.mkdir()
        for i, text in enumerate(documents):
            (folder / f"{i:05}.md").write_text(text)
        with DocumentStore.open(store, loaded) as opened:
            began = processor_s()
            results = opened.add(folder, zone="device")
            took = processor_s() - began
        chunks = sum(result.num_chunks for result in results)
        size = sum(len(text.encode()) for text in documents)
        assert len(results) == len(documents) and all(result.status == "added" for result in results)
        print(  # noqa: T201
            f"{name:<7} {embedder:<7} {len(documents):>5} files {size / 1e6:6.2f} MB {chunks:>6} chunks {took:7.2f} s: "
            f"{1e3 * took / len(documents):9.2f} ms a file {1e3 * took / chunks:7.2f} ms a chunk "
            f"{size / took / 1e6:6.2f} MB/s, store {room(store) / size:.2f} x the text",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--embedded", type=int, default=60)
    options = parser.parse_args()
    rng = random.Random(7)
    added("small", texts(options.files, SMALL, rng), "hash")
    added("long", ["\n".join(texts(int(options.megabytes * 200), LONG, rng))], "hash")
    added("words", texts(options.embedded, LONG, rng), "hash")
    added("words", texts(options.embedded, LONG, rng), "minilm")


if __name__ == "__main__":
    main()
