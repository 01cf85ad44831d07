"""`paceline bench perplexity`: perplexity of text given retrieved documents, by the way they are put in prompts.

The methods are those of `bench/retrieval/methods.py`: no retrieval, one side's documents in one context, both sides'
in one context, and a branch per document, mixed. All use the same model. The first eighth of a window is the query and
is not scored (DRAGON 7.2). Claims: the ratio of gains over no retrieval, ours to the best baseline's, at the greatest
number of documents; and the part of ours that documents of other articles do not give.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.aggregation.weights import decayed_evidence
from paceline.core.sampling.dist import Dist
from paceline.core.side import SIDES, Side
from paceline.engine.loader import load_model, served_name
from paceline.models import DEVICE
from paceline.rag.embedder import Embedder, load_embedder
from paceline.rag.index import VectorIndex
from paceline.rag.prompt import RELEVANCE_TEMPERATURE

from .bootstrap import Estimate, estimate
from .findings import claimed
from .plots import lines
from .report import Claim, Options, Report
from .retrieval.articles import Piece, Shelves, Window
from .retrieval.corpora import SEED, Material, gather
from .retrieval.methods import METHODS, Found, Ids, Plan, Retrieved, mixture
from .retrieval.ngram_model import CopyingTables, Static, fit
from .retrieval.scorers import EngineScorer, Probabilities, Scorer

NAME: Final = "perplexity"
SUMMARY: Final = "perplexity of text against documents per side; baselines: none, one side's, all in one context"

BASELINES: Final = ("crcg_device", "crcg_cloud", "drcg")
OURS: Final = "ours"
FIXED: Final = "fixed"  # ours with R fixed by the query
DRAWN: Final = (*BASELINES, OURS, FIXED)
TARGET: Final = 1.4
OWED: Final = 0.5  # of the gain; the rest is that of mixing any distributions
PAPER: Final = "1.9 (Qwen2.5-1.5B, WikiText-2), 1.4 (OPT-1.3B, WikiText-103)"

KV_ROWS: Final = 8192  # more than the rows of one forward of EngineScorer
MODELS: Final = True  # the device's

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
    query_share: int = 8  # the query is 1 / query_share of a window
    temperature: float = RELEVANCE_TEMPERATURE
    embedder: str = "minilm"
    resamples: int = 1000  # of windows, for the interval

    @property
    def deepest(self) -> int:
        return max(self.depths)

    def start(self, window: Ids) -> int:
        """First scored token, after the query."""
        return max(4, len(window) // self.query_share)


QUICK = Workload(windows=4, tested=3, depths=(0, 4, 16))


class Library:
    """Exact search by cosine of embeddings in both sides' corpora. R = cosine / temperature on both sides."""

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
                Retrieved(side, self._pieces[side][index].ids, cosine / self._temperature)
                for index, cosine in self._indexes[side].search(vector, depth)
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
        """Perplexity over all windows, or over those at the indices `among` (with repetition)."""
        selected = slice(None) if among is None else among
        return math.exp(-float(self.logs[depth, method][selected].sum()) / float(self.tokens[selected].sum()))

    def gain(self, depth: int, among: NDArray[np.intp] | None = None, *, method: str = OURS) -> float:
        none, ours, *baselines = (self.perplexity(depth, each, among) for each in ("none", method, *BASELINES))
        return gain_ratio(none, ours, baselines)

    def gain_estimate(self, depth: int, resamples: int) -> Estimate:
        """The gain ratio over resampled windows."""
        return estimate(len(self.tokens), lambda among: self.gain(depth, np.array(among, np.intp)), resamples)

    def owed_to_documents(self, control: Measured, depth: int, resamples: int) -> Estimate:
        """The part of our gain over no retrieval that documents of other articles do not give. control: the same
        windows with those."""

        def part(among: Sequence[int]) -> float:
            of = np.array(among, np.intp)
            none, ours, other = (
                self.perplexity(depth, "none", of),
                self.perplexity(depth, OURS, of),
                control.perplexity(depth, OURS, of),
            )
            return (other - ours) / max(none - ours, 0.01 * none)

        return estimate(len(self.tokens), part, resamples)


def measure(
    scorer: Scorer, windows: Sequence[Window], found: Sequence[Found], separator: Ids, load: Workload
) -> Measured:
    """Every method at every depth of `load`, on the same windows. found: of each window, at the greatest depth."""
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
    """For each window the documents found for the next window of another article. Empty if all are of one article."""
    others: list[Found] = []
    for i, window in enumerate(windows):
        after = [*range(i + 1, len(windows)), *range(i)]
        others += [found[other] for other in after if windows[other].article != window.article][:1]
    return others


def score_plans(scorer: Scorer, plans: dict[Key, Plan], window: Ids, start: int) -> dict[Key, float]:
    """Summed log-probability of window[start:] under each plan. A context that several plans share is scored once."""
    contexts = list(dict.fromkeys(context.ids for plan in plans.values() for context in plan.contexts))
    scored = dict(zip(contexts, scorer.score(contexts, window, start), strict=True))
    rows = {ids: _sparse(window[start:], probabilities) for ids, probabilities in scored.items()}
    return {
        key: _log_probability(plan, [rows[context.ids] for context in plan.contexts], window[start:])
        for key, plan in plans.items()
    }


def _log_probability(plan: Plan, rows: Sequence[Sequence[Dist]], text: Ids) -> float:
    """rows: for each context, the distributions of the text's tokens."""
    contexts, total = plan.contexts, 0.0
    evidence = [0.0] * len(contexts)
    for i, token in enumerate(text):
        dists = [row[i] for row in rows]
        if plan.rescored:
            contexts = tuple(
                context if context.score is None else replace(context, score=context.score + bonus)
                for context, bonus in zip(plan.contexts, evidence, strict=True)
            )
            logs = [math.log(dist.prob(token)) for dist in dists]
            evidence = [decayed_evidence(bonus, log) for bonus, log in zip(evidence, logs, strict=True)]
        total += math.log(mixture(contexts, dists).prob(token))
    return total


def _sparse(tokens: Ids, probabilities: Probabilities) -> list[Dist]:
    """Distributions with the text's token only; all others are in the tail."""
    return [
        Dist(np.array([token], np.int32), np.array([p]), 1.0 - p)
        for token, p in zip(tokens, probabilities.tolist(), strict=True)
    ]


def gain_ratio(none: float, ours: float, baselines: Iterable[float]) -> float:
    """Gain of ours over no retrieval, relative to the best baseline's gain, which counts as at least 1 %."""
    best = max(none - min(baselines), 0.01 * none)
    return (none - ours) / best


# ---- the bench -------------------------------------------------------------------------------------------------------
def run(options: Options, workload: Workload | None = None) -> Report:
    """Two models on the same windows and documents: the demo's device model (for the claim) or that of `--models`, and
    n-gram tables."""
    load = workload or (QUICK if options.quick else Workload())
    real = options.models
    model = real.load("device", kv_rows=KV_ROWS) if real else load_model(DEVICE, threads=1, kv_rows=KV_ROWS)
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    separator = tuple(encode("\n"))
    material = gather(options.data, encode, window=load.window, passage=load.passage, tested=load.tested)
    embedder = load_embedder(load.embedder)
    library = Library(material.test, embedder, decode, load.temperature)
    fit_library = Library(material.lessons, embedder, decode, load.temperature)
    windows = random.Random(SEED).sample(material.test.windows, min(load.windows, len(material.test.windows)))
    found = [library.find(window.ids[: load.start(window.ids)], load.deepest) for window in windows]
    described = served_name(real.device) if real else "the demo's device model (4.7M parameters), as it is shipped"
    scorers: dict[str, Scorer] = {"real" if real else "demo": EngineScorer(model.engine, described)}
    if not real:
        scorers["tables"] = fit_tables(material, fit_library, separator, model.tokenizer.vocab_size, load)
    rows: list[dict[str, object]] = []
    claims: list[Claim] = []
    for name, scorer in scorers.items():
        suffix = "" if name == "demo" else f"_{name}"
        measured = measure(scorer, windows, found, separator, load)
        rows += [row(name, "own", measured, depth) for depth in load.depths]
        if others := strangers(windows, found):
            control = measure(scorer, windows, others, separator, replace(load, depths=(load.deepest,)))
            rows.append(row(name, "other", control, load.deepest))
            owed = measured.owed_to_documents(control, load.deepest, load.resamples)
            claims.append(claimed(f"{NAME}.owed_to_documents{suffix}", owed, OWED, "higher"))
        gain = measured.gain_estimate(load.deepest, load.resamples)
        claims.append(claimed(f"{NAME}.gain_ratio{suffix}", gain, TARGET, "higher", PAPER))
    conditions = {
        "text": material.name,
        "models": {name: scorer.description for name, scorer in scorers.items()},
        "vocabulary": model.tokenizer.vocab_size,  # perplexities are per token of it
        "windows": len(windows),
        "window_tokens": load.window,
        "query": f"the first 1/{load.query_share} of a window, not scored",
        "document_tokens": load.passage,
        "context_tokens": load.budget,
        "documents_in_corpora": {side: len(material.test.of(side)) for side in SIDES},
        "retrieval": load.embedder,
        "relevance_temperature": load.temperature,
        "interval_90": "resampled windows",
        "privacy": "none: no link; distributions of both sides' documents are mixed whole, as at open",
        "articles": "own: documents found for the window; other: those found for a window of another article",
        "clock": "none: nothing is timed",
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def fit_tables(material: Material, library: Library, separator: Ids, vocab_size: int, load: Workload) -> CopyingTables:
    """N-gram tables of the training text; the weights of copying are fitted on windows with two documents a side."""
    samples: list[tuple[Ids, Ids, int]] = []
    for window in material.lessons.windows:
        start = load.start(window.ids)
        found = library.find(window.ids[:start], 2)
        plans = [method(found, separator, load.budget) for method in METHODS]
        contexts = dict.fromkeys(context.ids for plan in plans for context in plan.contexts)
        samples += [(context, window.ids, start) for context in contexts]
    tokens = sum(map(len, material.reading))
    description = f"Kneser-Ney 4-grams of {tokens:,} tokens of other articles, and copying from the context"
    return fit(Static(material.reading, vocab_size), samples, description)


def row(model: str, articles: str, measured: Measured, depth: int) -> dict[str, object]:
    found = {method: measured.perplexity(depth, method) for method in ("none", *BASELINES, OURS, FIXED)}
    ratios = {}
    if depth and articles == "own":
        ratios = {"gain_ratio": measured.gain(depth), "fixed_ratio": measured.gain(depth, method=FIXED)}
    return {"model": model, "articles": articles, "documents": depth} | found | ratios


def plot(report: Report) -> str:
    """Plot, for the first model, the reduction of perplexity by each method."""
    first = report.rows[0]["model"]
    rows = [
        {"documents": each["documents"]}
        | {method: 100 * (1 - float(str(each[method])) / float(str(each["none"]))) for method in DRAWN}
        for each in report.rows
        if each["model"] == first and each["articles"] == "own"
    ]
    return lines(rows, x="documents", ys=DRAWN, unit="% less perplexity than without documents", title=NAME)
