"""Placement of the aggregator: rules compared in virtual time, as by DRAGON's authors (section 7.4).

99 tokens; decode times and the link are the authors' means and formula; a side's drafts are accepted with probability
0.49 or 0.99, drawn for each sequence and side. All rules get the same sequences and the same link.

Claims: our rule is at no latency slower than the best of the four baselines, with equal weights of the four kinds of
sequences; and the replay agrees with the authors' published totals. Those are means over one draw of 50 sequences of
unknown kinds, and such a draw changes a mean by 4 % and more. The shares of the kinds are therefore inferred from the
totals, without the latency under comparison: the shares that fit the other four latencies predict the fifth.
`even_error` is the error without inference, with a quarter of each kind.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.side import SIDES, Side

from .aggregation.link_replay import Link, Replay, Trace
from .aggregation.placement_rules import RULES
from .plots import lines
from .report import Claim, Options, Report

NAME: Final = "scheduling"
SUMMARY: Final = "placement of the aggregator on replayed traces; baselines: device, cloud, random, always"

TOKENS: Final = 99
DECODE: Final[Mapping[Side, float]] = {"cloud": 0.020, "device": 0.262}  # s
ACCEPTANCE: Final = (0.49, 0.99)
KINDS: Final = tuple((cloud, device) for cloud in ACCEPTANCE for device in ACCEPTANCE)
LATENCIES: Final = (0.0, 0.1, 0.2, 0.3, 0.4)  # s, one way, on top of the link's own
LIMIT: Final = 100.0  # s, at which the authors' simulator stops
PUBLISHED_SEQUENCES: Final = 50
# Seconds for 99 tokens at each latency, from the history of the authors' repository.
PUBLISHED: Final[Mapping[str, tuple[float, ...]]] = {
    "cloud": (26.31, 31.42, 36.12, 40.57, 45.27),
    "device": (26.07, 26.20, 29.19, 34.90, 40.45),
    "always": (26.18, 28.71, 32.49, 37.21, 43.08),
    "random": (26.18, 28.84, 32.68, 36.83, 42.08),
    "dragon": (26.07, 26.26, 28.99, 32.05, 34.96),
    "token-wise device": (26.48, 26.71, 44.30, 61.16, 83.32),
    "token-wise cloud": (27.47, 47.40, 66.23, 87.91, 100.0),
}
TOKEN_WISE: Final = "token-wise "
BASELINES: Final = ("device", "cloud", "random", "always")
OURS: Final = "paceline"

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Workload:
    seeds: int = 3  # draws of all sequences
    sequences: int = 12  # of each kind in a draw


QUICK = Workload(seeds=1, sequences=6)


def run(options: Options, workload: Workload | None = None) -> Report:
    """Needs no data and no model. Intervals are 95 % of the mean over sequences and seeds."""
    load = workload or (QUICK if options.quick else Workload())
    measured = {name: measure(name, load) for name in (*PUBLISHED, OURS)}
    even = np.full(len(KINDS), 1.0 / len(KINDS))
    means = {name: even @ seconds.mean(axis=-1) for name, seconds in measured.items()}  # (latencies,)
    shares = [inferred(measured, without=i) for i in range(len(LATENCIES))]
    rows = []
    for i, latency in enumerate(LATENCIES):
        best = min(float(means[name][i]) for name in BASELINES)
        for name, seconds in measured.items():
            mean, half = float(means[name][i]), interval(seconds[:, i])
            row: dict[str, object] = {
                "latency_s": latency,
                "strategy": name,
                "seconds": mean,
                "low": mean - half,
                "high": mean + half,
                "vs_best_baseline": mean / best,
            }
            if name in PUBLISHED:
                predicted = float(shares[i] @ seconds[:, i].mean(axis=-1))
                row |= {"published": PUBLISHED[name][i], "predicted": predicted}
                row["error"] = abs(predicted / PUBLISHED[name][i] - 1.0)
                row["even_error"] = abs(mean / PUBLISHED[name][i] - 1.0)
            rows.append(row)
    ratios = [float(means[OURS][i]) / min(float(means[name][i]) for name in BASELINES) for i in range(len(LATENCIES))]
    errors = [error for row in rows if isinstance(error := row.get("error"), float)]
    claims = [
        Claim("scheduling.vs_best_baseline", max(ratios), 1.0, "lower", "matches or beats all"),
        Claim("scheduling.table_error", max(errors), 0.05, "lower"),
    ]
    conditions = {
        "clock": "virtual",
        "tokens": TOKENS,
        "decode_s": dict(DECODE),
        "acceptance": list(ACCEPTANCE),
        "link": "one way 2 ms + U(0, 6 ms) + L (1 + sin(t / 10 s) / 5), both directions",
        "draft_ahead": 10,
        "sequences": load.seeds * load.sequences * len(KINDS),
        "seeds": load.seeds,
        "inferred_shares": [[round(float(share), 2) for share in each] for each in shares],
        "kinds": [f"cloud {cloud}, device {device}" for cloud, device in KINDS],
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def plot(report: Report) -> str:
    """Plot a line for each strategy except the token-wise ones, which would dwarf the others."""
    shown = (*BASELINES, "dragon", OURS)
    points = {latency: {"latency_s": latency} for latency in LATENCIES}
    for row in report.rows:
        latency, seconds = row["latency_s"], row["seconds"]
        if row["strategy"] in shown and isinstance(latency, float) and isinstance(seconds, float):
            points[latency][str(row["strategy"])] = seconds
    return lines(list(points.values()), x="latency_s", ys=shown, unit=f"s for {TOKENS} tokens", title=NAME)


def measure(name: str, load: Workload) -> Seconds:
    """(kinds, latencies, seeds * sequences): seconds until the last target, at most LIMIT."""
    rule = name.removeprefix(TOKEN_WISE)
    count, kinds = load.seeds * load.sequences, range(len(KINDS)) if rule == name else range(1)
    seconds = [
        [
            [replay(rule, latency, kind, sequence, token_wise=rule != name) for sequence in range(count)]
            for latency in LATENCIES
        ]
        for kind in kinds  # token by token, acceptance has no effect: one kind represents all
    ]
    return np.broadcast_to(np.array(seconds), (len(KINDS), len(LATENCIES), count))


def replay(rule: str, latency: float, kind: int, sequence: int, *, token_wise: bool = False) -> float:
    """Seconds of one sequence. Randomness depends only on kind and sequence, so it is the same for all rules."""
    trace, link = draw(kind, sequence), Link(latency)
    coins = np.random.default_rng([kind, sequence, 1])
    placement = RULES[rule](trace, link, coins)
    run = Replay(trace.synchronous() if token_wise else trace, link, placement, seed=(kind, sequence, 2)).run()
    return min(run.seconds, LIMIT)


def draw(kind: int, sequence: int) -> Trace:
    rng = np.random.default_rng([kind, sequence, 0])
    accepted = {
        side: (rng.random(TOKENS) < rate).tolist() for side, rate in zip(SIDES, KINDS[kind], strict=True)
    }  # KINDS and SIDES: cloud first
    return Trace(accepted, {side: [DECODE[side]] * TOKENS for side in SIDES})


def inferred(measured: Mapping[str, Seconds], without: int) -> Seconds:
    """Share of each kind in the authors' sequences, inferred from the totals at all latencies but one.

    Minimises the squared relative errors over all compositions of their 50 sequences. Token-wise totals do not depend
    on the kinds and are left out.
    """
    kept = [i for i in range(len(LATENCIES)) if i != without]
    names = [name for name in PUBLISHED if not name.startswith(TOKEN_WISE)]
    totals = np.concatenate([measured[name].mean(axis=-1)[:, kept] for name in names], axis=1)  # (kinds, cells)
    published = np.concatenate([np.array(PUBLISHED[name])[kept] for name in names])
    compositions = _compositions()
    errors = ((compositions @ totals / published - 1.0) ** 2).sum(axis=1)
    return np.asarray(compositions[int(errors.argmin())])


def interval(seconds: Seconds) -> float:
    """Half of the 95 % interval of the mean over equally weighted kinds. seconds: (kinds, sequences)"""
    kinds, sequences = seconds.shape
    if sequences < 2:
        return math.inf
    variance = float(seconds.var(axis=1, ddof=1).sum()) / sequences
    return 1.96 * math.sqrt(variance) / float(kinds)


@functools.cache
def _compositions() -> Seconds:
    """(compositions, kinds): all compositions of the authors' sequences by kind, as shares."""
    counts = np.indices((PUBLISHED_SEQUENCES + 1,) * (len(KINDS) - 1)).reshape(len(KINDS) - 1, -1)
    last = PUBLISHED_SEQUENCES - counts.sum(axis=0)
    return np.asarray(np.vstack([counts, last]).T[last >= 0] / PUBLISHED_SEQUENCES)
