"""`python -m bench.retrieval.search_again --data DATA`: perplexity where documents are searched again while text grows.

Every n tokens both sides search with the query and the text so far, instead of with the query alone. What they find
either takes the place of the documents (`replaced`), or only weighs those of the query anew (`weighed`); with the
evidence of the text, which is what the program does, or without. On the articles of `corpora` that no bench claims on.

Not modelled: seconds of the search and of the new documents' prefill. A search is answered at once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from paceline.core.aggregation.weights import decayed_evidence
from paceline.core.sampling.dist import Dist
from paceline.engine.loader import load_model
from paceline.models import DEVICE
from paceline.rag.embedder import load_embedder

from ..bootstrap import estimate
from ..perplexity import KV_ROWS, Library, Workload, upto
from .corpora import gather
from .methods import Context, Found, Ids, mixture
from .scorers import EngineScorer, Scorer

EVERY: Final = (8, 16, 32, 64)  # tokens
DEPTHS: Final = (1, 2, 4)  # documents on each side
NOW: Final = "evidence"  # as served


@dataclass(frozen=True, slots=True)
class Way:
    """every: tokens between two searches; 0: one, with the query. replaced: by what is found; else the documents of
    the query get the weight that they have for the text so far."""

    every: int = 0
    replaced: bool = False
    evidence: bool = True

    @property
    def name(self) -> str:
        if not self.every:
            return NOW if self.evidence else "fixed"
        what = "replaced" if self.replaced else "weighed"
        return f"{what} every {self.every}" + (f", {NOW}" if self.evidence else "")


WAYS: Final = (
    Way(),
    Way(evidence=False),
    *(Way(every, replaced, evidence) for every in EVERY for replaced in (False, True) for evidence in (True, False)),
)


def boundary(way: Way, place: int, start: int) -> int:
    """Length of the text that was searched with for the token at a place."""
    return start if not way.every else start + (place - start) // way.every * way.every


def documents(way: Way, first: Found, now: Found, all_now: Found) -> list[Context]:
    """first, now: found for the query, and for the text so far. all_now: likewise, of everything there is."""
    found = [each for side in now.values() for each in side]
    if way.every and not way.replaced:
        scores = {each.ids: each.score for side in all_now.values() for each in side}
        found = [replace(each, score=scores.get(each.ids, each.score)) for side in first.values() for each in side]
    elif not way.every:
        found = [each for side in first.values() for each in side]
    return [Context(each.side, each.ids, each.score) for each in found]


def log_probability(
    way: Way, text: Ids, start: int, searches: Mapping[int, Found], depth: int, rows: Mapping[Ids, Sequence[Dist]]
) -> float:
    """Log-probability of text[start:]. searches: by length of the text. rows: of each document, distributions of the
    text's tokens from `start` on."""
    total = 0.0
    evidence = dict.fromkeys(rows, 0.0)  # of every document that is read at any time, as its prefill would give it
    first = upto(searches[start], depth)
    for place in range(start, len(text)):
        now = searches[boundary(way, place, start)]
        contexts = documents(way, first, upto(now, depth), now)
        dists = [rows[context.ids][place - start] for context in contexts]
        if way.evidence:
            contexts = [replace(each, score=(each.score or 0.0) + evidence[each.ids]) for each in contexts]
            for ids, row in rows.items():
                evidence[ids] = decayed_evidence(evidence[ids], math.log(row[place - start].prob(text[place])))
        total += math.log(mixture(contexts, dists).prob(text[place]))
    return total


def measure(
    scorer: Scorer, library: Library, windows: Sequence[Ids], load: Workload, separator: Ids
) -> Iterator[dict[str, object]]:
    """A row for each number of documents and way: perplexity, and ÷ that as served, over resampled windows."""
    logs: dict[tuple[int, str], list[float]] = {}
    tokens = []
    for text in windows:
        start = load.start(text)
        lengths = {boundary(way, place, start) for way in WAYS for place in range(start, len(text))}
        searches = {length: library.find(text[:length], load.deepest) for length in lengths}
        read = {each.ids for found in searches.values() for side in upto(found, max(DEPTHS)).values() for each in side}
        scored = scorer.score([ids + separator for ids in read], text, start)
        rows = {
            ids: _dists(text[start:], probabilities.tolist()) for ids, probabilities in zip(read, scored, strict=True)
        }
        for depth in DEPTHS:
            for way in WAYS:
                value = log_probability(way, text, start, searches, depth, rows)
                logs.setdefault((depth, way.name), []).append(value)
        tokens.append(len(text) - start)
    for (depth, name), values in logs.items():
        served = logs[depth, NOW]

        def ratio(among: Sequence[int], values: Sequence[float] = values, served: Sequence[float] = served) -> float:
            return math.exp(sum(served[i] - values[i] for i in among) / sum(tokens[i] for i in among))

        perplexity = math.exp(-sum(values) / sum(tokens))
        against = estimate(len(tokens), ratio, load.resamples)
        yield {
            "documents": depth,
            "way": name,
            "perplexity": perplexity,
            "vs_served": against.value,
            "interval_90": against.interval,
        }


def _dists(tokens: Ids, probabilities: Sequence[float]) -> list[Dist]:
    return [Dist(np.array([t], np.int32), np.array([p]), 1.0 - p) for t, p in zip(tokens, probabilities, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder with the evaluation sets; default: the encyclopaedia")
    parser.add_argument("--windows", type=int, default=48)
    arguments = parser.parse_args()
    load = Workload()
    model = load_model(DEVICE, threads=1, kv_rows=KV_ROWS)
    material = gather(arguments.data, model.tokenizer.encode, window=load.window, passage=load.passage)
    library = Library(material.lessons, load_embedder(load.embedder), model.tokenizer.decode, load.temperature)
    windows = [window.ids for window in material.lessons.windows[: arguments.windows]]
    scorer = EngineScorer(model.engine, "the demo's device model")
    for row in measure(scorer, library, windows, load, tuple(model.tokenizer.encode("\n"))):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
