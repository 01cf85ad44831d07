"""`paceline bench perplexity`: what documents are worth to a text, by how they are read.

Perplexity of test text against the documents retrieved on each side, for the methods of `bench/retrieval/methods.py`:
no retrieval, one side's documents in one context, both sides' in one context, and a branch per document, mixed. One
model for all. The first eighth of a window is the query and is not scored (DRAGON 7.2). Claim: the ratio of gains over
no retrieval, ours to the second best, at the most documents.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.aggregation.weights import decayed_evidence
from paceline.core.sampling.dist import Dist
from paceline.core.side import SIDES, Side
from paceline.engine.loader import load_model
from paceline.models import DEVICE
from paceline.rag.embedder import Embedder, load_embedder
from paceline.rag.index.faiss_index import VectorIndex
from paceline.rag.prompt import RELEVANCE_TEMPERATURE

from .report import Claim, Options, Report, plot_lines
from .retrieval.articles import Piece, Shelves, Window
from .retrieval.corpora import SEED, Material, gather
from .retrieval.methods import METHODS, Found, Ids, Plan, Retrieved, mixture
from .retrieval.ngram_model import CopyingTables, Static, fit
from .retrieval.scorers import EngineScorer, Probabilities, Scorer

NAME: Final = "perplexity"
SUMMARY: Final = "perplexity of text against documents per side; baselines: none, one side's, all in one context"

BASELINES: Final = ("crcg_device", "crcg_cloud", "drcg")
OURS: Final = "ours"
FIXED: Final = "fixed"  # ours with R of the query alone
DRAWN: Final = (*BASELINES, OURS, FIXED)
TARGET: Final = 1.4
PAPER: Final = "1.9 (Qwen2.5-1.5B, WikiText-2), 1.4 (OPT-1.3B, WikiText-103)"

KV_ROWS: Final = 8192  # more than the rows of one forward of EngineScorer

Key = TypeVar("Key")
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths are in the models' tokens. The paper's: windows of 512 or 1,024, documents of 64, contexts of 256."""

    depths: tuple[int, ...] = (0, 2, 4, 8, 16)  # documents on each side
    budget: int = 256  # of documents in one context
    window: int = 256
    passage: int = 64
    windows: int = 64
    tested: int | None = None  # articles; None: half of the set's
    query_share: int = 8  # one part in so many of a window is the query
    temperature: float = RELEVANCE_TEMPERATURE
    embedder: str = "minilm"
    resamples: int = 1000  # of windows, for the interval

    @property
    def deepest(self) -> int:
        return max(self.depths)

    def start(self, window: Ids) -> int:
        """Where the scored part begins: behind the query."""
        return max(4, len(window) // self.query_share)


QUICK = Workload(windows=4, tested=3, depths=(0, 4, 16))


class Library:
    """Both sides' corpora, searchable: cosine of embeddings, exact. R = cosine / temperature on either side."""

    def __init__(self, shelves: Shelves, embedder: Embedder, decode: Decode, temperature: float) -> None:
        self._embedder, self._decode, self._temperature = embedder, decode, temperature
        self._pieces: dict[Side, list[Piece]] = {side: shelves.of(side) for side in SIDES}
        self._indexes = {side: self._index(pieces) for side, pieces in self._pieces.items()}

    def _index(self, pieces: Sequence[Piece]) -> VectorIndex:
        vectors = self._embedder.embed([self._decode(piece.ids) for piece in pieces])
        return VectorIndex(np.arange(len(pieces), dtype=np.int64), vectors)

    def find(self, query: Ids, depth: int) -> Found:
        """At most `depth` documents of each side, best first."""
        vector = self._embedder.embed([self._decode(query)])[0]
        return {
            side: [
                Retrieved(side, self._pieces[side][place].ids, cosine / self._temperature)
                for place, cosine in self._indexes[side].search(vector, depth)
            ]
            for side in SIDES
        }


def upto(found: Found, depth: int) -> Found:
    return {side: documents[:depth] for side, documents in found.items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """Log-probability of the scored part of every window, under one model."""

    tokens: NDArray[np.float64]  # (windows,) scored
    logs: dict[tuple[int, str], NDArray[np.float64]]  # (depth, method) -> (windows,) natural logarithms, summed

    def perplexity(self, depth: int, method: str, among: NDArray[np.intp] | None = None) -> float:
        """Of all windows, or of those at these places (with repetition)."""
        which = slice(None) if among is None else among
        return math.exp(-float(self.logs[depth, method][which].sum()) / float(self.tokens[which].sum()))

    def gain(self, depth: int, among: NDArray[np.intp] | None = None, *, method: str = OURS) -> float:
        none, ours, *baselines = (self.perplexity(depth, each, among) for each in ("none", method, *BASELINES))
        return gain_ratio(none, ours, baselines)

    def interval(self, depth: int, resamples: int) -> tuple[float, float]:
        """The middle 90 % of the gain ratio when windows are drawn anew, with repetition."""
        generator, count = np.random.default_rng(SEED), len(self.tokens)
        drawn = [self.gain(depth, generator.integers(count, size=count)) for _ in range(resamples)]
        low, high = np.quantile(drawn, (0.05, 0.95))
        return float(low), float(high)


def measure(
    scorer: Scorer, windows: Sequence[Window], found: Sequence[Found], separator: Ids, load: Workload
) -> Measured:
    """Every method at every depth of `load`, on the same windows. found: of each window, at the most documents."""
    logs: dict[tuple[int, str], list[float]] = {}
    tokens: list[float] = []
    for window, documents in zip(windows, found, strict=True):
        plans = {
            (depth, plan.method): plan
            for depth in load.depths
            for plan in (method(upto(documents, depth), separator, load.budget) for method in METHODS)
        }
        start = load.start(window.ids)
        for key, value in score_plans(scorer, plans, window.ids, start).items():
            logs.setdefault(key, []).append(value)
        tokens.append(len(window.ids) - start)
    return Measured(np.array(tokens, float), {key: np.array(values) for key, values in logs.items()})


def strangers(windows: Sequence[Window], found: Sequence[Found]) -> list[Found]:
    """For each window what was found for another, of the next article among the windows. Empty where all are of one."""
    others: list[Found] = []
    for place, window in enumerate(windows):
        after = [*range(place + 1, len(windows)), *range(place)]
        others += [found[other] for other in after if windows[other].article != window.article][:1]
    return others


def score_plans(scorer: Scorer, plans: dict[Key, Plan], window: Ids, start: int) -> dict[Key, float]:
    """Summed log-probability of window[start:] under each plan. Each context is scored once, however many share it."""
    contexts = list(dict.fromkeys(context.ids for plan in plans.values() for context in plan.contexts))
    scored = dict(zip(contexts, scorer.score(contexts, window, start), strict=True))
    rows = {ids: _sparse(window[start:], probabilities) for ids, probabilities in scored.items()}
    return {
        key: _log_probability(plan, [rows[context.ids] for context in plan.contexts], window[start:])
        for key, plan in plans.items()
    }


def _log_probability(plan: Plan, rows: Sequence[Sequence[Dist]], text: Ids) -> float:
    """rows: of each context, what it says of each token of the text."""
    contexts, total = plan.contexts, 0.0
    merits = [0.0] * len(contexts)
    for place, token in enumerate(text):
        dists = [row[place] for row in rows]
        if plan.rescored:
            contexts = tuple(
                context if context.score is None else replace(context, score=context.score + merit)
                for context, merit in zip(plan.contexts, merits, strict=True)
            )
            told = [math.log(dist.prob(token)) for dist in dists]
            merits = [decayed_evidence(merit, log) for merit, log in zip(merits, told, strict=True)]
        total += math.log(mixture(contexts, dists).prob(token))
    return total


def _sparse(tokens: Ids, probabilities: Probabilities) -> list[Dist]:
    """Only the token that is there counts: all others are the tail."""
    return [
        Dist(np.array([token], np.int32), np.array([p]), 1.0 - p)
        for token, p in zip(tokens, probabilities.tolist(), strict=True)
    ]


def gain_ratio(none: float, ours: float, baselines: Iterable[float]) -> float:
    """Perplexity gained by ours over that by the best baseline. One that gains less than 1 % counts as gaining 1 %."""
    best = max(none - min(baselines), 0.01 * none)
    return (none - ours) / best


# ---- the bench -------------------------------------------------------------------------------------------------------
def run(options: Options, workload: Workload | None = None) -> Report:
    """Two models on the same windows and documents: the demo's device model, and tables. The claim is the first's."""
    load = workload or (QUICK if options.quick else Workload())
    model = load_model(DEVICE, threads=1, kv_rows=KV_ROWS)
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    separator = tuple(encode("\n"))
    material = gather(options.data, encode, window=load.window, passage=load.passage, tested=load.tested)
    embedder = load_embedder(load.embedder)
    library = Library(material.test, embedder, decode, load.temperature)
    lessons = Library(material.lessons, embedder, decode, load.temperature)
    windows = random.Random(SEED).sample(material.test.windows, min(load.windows, len(material.test.windows)))
    found = [library.find(window.ids[: load.start(window.ids)], load.deepest) for window in windows]
    scorers: dict[str, Scorer] = {
        "demo": EngineScorer(model.engine, "the demo's device model (4.7M parameters), as it is shipped"),
        "tables": taught(material, lessons, separator, model.tokenizer.vocab_size, load),
    }
    rows: list[dict[str, object]] = []
    claims: list[Claim] = []
    intervals: dict[str, list[float]] = {}
    for name, scorer in scorers.items():
        measured = measure(scorer, windows, found, separator, load)
        rows += [row(name, "own", measured, depth) for depth in load.depths]
        if others := strangers(windows, found):
            control = measure(scorer, windows, others, separator, replace(load, depths=(load.deepest,)))
            rows.append(row(name, "other", control, load.deepest))
        claim = f"{NAME}.gain_ratio" + ("" if name == "demo" else f"_{name}")
        claims.append(Claim(claim, measured.gain(load.deepest), TARGET, "higher", PAPER))
        intervals[claim] = [round(bound, 3) for bound in measured.interval(load.deepest, load.resamples)]
    conditions = {
        "text": material.name,
        "models": {name: scorer.description for name, scorer in scorers.items()},
        "vocabulary": model.tokenizer.vocab_size,  # perplexities are of its tokens
        "windows": len(windows),
        "window_tokens": load.window,
        "query": f"the first 1/{load.query_share} of a window, not scored",
        "document_tokens": load.passage,
        "context_tokens": load.budget,
        "documents_in_corpora": {side: len(material.test.of(side)) for side in SIDES},
        "retrieval": load.embedder,
        "relevance_temperature": load.temperature,
        "interval_90": intervals,
        "articles": "own: documents found for the window; other: those found for a window of another article",
        "clock": "none: nothing is timed",
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def taught(material: Material, library: Library, separator: Ids, vocab_size: int, load: Workload) -> CopyingTables:
    """Tables that have counted the reading; how far they copy is fitted on windows with two documents a side."""
    lessons: list[tuple[Ids, Ids, int]] = []
    for window in material.lessons.windows:
        start = load.start(window.ids)
        found = library.find(window.ids[:start], 2)
        plans = [method(found, separator, load.budget) for method in METHODS]
        contexts = dict.fromkeys(context.ids for plan in plans for context in plan.contexts)
        lessons += [(context, window.ids, start) for context in contexts]
    tokens = sum(map(len, material.reading))
    description = f"Kneser-Ney 4-grams of {tokens:,} tokens of other articles, and copying from the context"
    return fit(Static(material.reading, vocab_size), lessons, description)


def row(model: str, articles: str, measured: Measured, depth: int) -> dict[str, object]:
    found = {method: measured.perplexity(depth, method) for method in ("none", *BASELINES, OURS, FIXED)}
    ratios = {}
    if depth and articles == "own":
        ratios = {"gain_ratio": measured.gain(depth), "fixed_ratio": measured.gain(depth, method=FIXED)}
    return {"model": model, "articles": articles, "documents": depth} | found | ratios


def plot(report: Report, file: Path) -> None:
    """Of the first model: how much of the perplexity without documents each method takes away."""
    first = report.rows[0]["model"]
    rows = [
        {"documents": each["documents"]}
        | {method: 100 * (1 - float(str(each[method])) / float(str(each["none"]))) for method in DRAWN}
        for each in report.rows
        if each["model"] == first and each["articles"] == "own"
    ]
    shown = Report(report.bench, report.conditions, rows)
    plot_lines(shown, file, x="documents", ys=DRAWN, unit="% less perplexity than without documents")
