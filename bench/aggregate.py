"""`paceline bench aggregate`: time per token of joint answers against the round trip, on real processes.

A server and an agent, linked over an emulated network. Their engines are the seeded table model, delayed so that a
forward takes a given time on any machine. Answers are streamed by the agent and timed at the client. All modes run in
turn in the same pair of processes: token by token, whole sequences, chains of drafts (DRAGON as published), trees, and
each side alone (the cloud called directly, not over the link). The texts are compared as well: drafts change no token.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab.baselines.dragon import shaped, speed_up
from paceline.core.side import Side

from . import wide_vocabulary
from .aggregation import live_placement, payload_bytes
from .aggregation.process_pair import linked_pair
from .bootstrap import Estimate, ratio_of, worst_of
from .findings import claimed
from .plots import lines
from .report import Claim, Options, Report
from .streamed_answer import Answer, Asked

NAME = "aggregate"
SUMMARY = "time per token of joint answers against the round trip, 0-600 ms, on real processes"

PACES: Mapping[str, Mapping[Side, float]] = {
    "device 10x slower": {"cloud": 0.006, "device": 0.06},
    "equal": {"cloud": 0.03, "device": 0.03},
}
ROUND_TRIPS = (0.05, 0.1, 0.2, 0.3, 0.6)  # s; the jitter is a fifth of it
CLOUD_ONLY, CLOUD_DEFAULT = "cloud only", "cloud only, lookup_tree"
PRIVATE = "document-private"
WAYS: Mapping[str, Mapping[str, object]] = {
    # Trees first, before their look-up tables have seen another mode's answer to the same question and seed.
    "tree": {"strategy": "aggregate"} | shaped("tree", aggregator="mixture"),
    f"tree, {PRIVATE}": {"strategy": "aggregate", "privacy": PRIVATE} | shaped("tree", aggregator="mixture"),
    "tree, coin": {"strategy": "aggregate"} | shaped("tree", aggregator="coin"),
    "device only": {"strategy": "autoregressive"},
    "device only, lookup_tree": {"strategy": "lookup_tree"},
    CLOUD_ONLY: {"strategy": "autoregressive"},
    CLOUD_DEFAULT: {"strategy": "lookup_tree"},
    "token-wise": {"strategy": "aggregate"} | shaped("none", aggregator="mixture"),
    f"token-wise, {PRIVATE}": {"strategy": "aggregate", "privacy": PRIVATE} | shaped("none", aggregator="mixture"),
    "sequence-wise": {"strategy": "aggregate"} | shaped("sequence", aggregator="mixture"),
    "chain": {"strategy": "aggregate"} | shaped("chain", aggregator="mixture"),
    "chain, paper": {"strategy": "aggregate"} | shaped("chain", aggregator="paper"),
}
MODEL = "fake:1:0.6"  # with this spread the sides accept about three of four drafts
MAX_CLAIMED = 0.3  # s, the longest round trip of the claims; beyond it token-wise answers only take time
# s; up to this round trip the overhead over the device alone is claimed, from more answers, since they vary much.
MAX_NEAR = 0.05
NEAR_FACTOR = 4  # times as many answers


def run(options: Options) -> Report:
    tokens, count = 32, (1 if options.quick else 5)
    trips = (0.05, 0.3) if options.quick else ROUND_TRIPS
    wide = wide_vocabulary.measure(wide_vocabulary.QUICK if options.quick else wide_vocabulary.Load())
    measured: Measured = {}
    for pace, forward in PACES.items():
        for trip in trips:
            seeds = tuple(range(1, 1 + (NEAR_FACTOR * count if trip <= MAX_NEAR else count)))
            measured[pace, trip] = _measure(forward, trip, tokens, seeds)
    rows = [row for (pace, trip), answers in measured.items() for row in _rows(pace, PACES[pace], trip, answers)]
    sizes = payload_bytes.rows(20 if options.quick else 100)
    placement = live_placement.measure(live_placement.QUICK if options.quick else live_placement.Load())
    conditions = {
        "clock": "emulated: real processes, shaped link, paced engines",
        "model": f"{MODEL} (table model over bytes), one document a side, temperature 1",
        "forward_s": {pace: dict(forward) for pace, forward in PACES.items()},
        "row_s": ROW_S,
        "jitter": "a fifth of the round trip",
        "privacy": "open, but where a way names its level; claims against token-wise and the device are of both levels",
        "152k ids": "the same, 30 ms a forward on both sides, round trip 300 ms (wide_vocabulary.py)",
        "interval_90": "answers to the same seed, resampled; the worst over paces",
        "quick": options.quick,
        "tokens": tokens,
        "answers": f"{count} each, {NEAR_FACTOR * count} at {1e3 * MAX_NEAR:g} ms and less",
        "client": "httpx at the agent, loopback; for the cloud alone at the cloud",
        "placement": "the decision live and kept on either side, in virtual time (aggregation/live_placement.py)",
        "bytes": f"of a message with one node, synthetic, {payload_bytes.VOCAB} ids (aggregation/payload_bytes.py)",
    }
    claims = (*_claims(measured), *wide.claims, *_size_claims(sizes), *placement.claims)
    return Report(NAME, conditions, rows + wide.rows + sizes + placement.rows, claims)


END = (256,)  # the fake model's end token
Measured = dict[tuple[str, float], Mapping[str, list[Answer]]]  # by pace and round trip: answers of each way

WARM_UP = 16  # tokens of an answer under each aggregator that is not measured: it calibrates both sides' speed
ROW_S = 0.0003  # s, time of each further row of a forward: for the slow device 16 rows take 1.08 times one row


def _measure(
    forward: Mapping[Side, float], trip: float, tokens: int, seeds: tuple[int, ...]
) -> Mapping[str, list[Answer]]:
    emulate: dict[Side, str] = {
        "cloud": f"forward={forward['cloud'] * 1000:g}ms,row={ROW_S * 1000:g}ms",
        "device": f"rtt={trip * 1000:g}ms,jitter={trip * 100:g}ms,"
        f"forward={forward['device'] * 1000:g}ms,row={ROW_S * 1000:g}ms",
    }
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory,
        linked_pair(Path(directory), model=MODEL, emulate=emulate) as pair,
    ):
        for way in ("tree", "tree, coin", "chain, paper"):
            Asked("fake", WARM_UP, END).answer(pair.device.url, WAYS[way], 99)
        urls = {way: (pair.cloud if way in (CLOUD_ONLY, CLOUD_DEFAULT) else pair.device).url for way in WAYS}
        asked = Asked("fake", tokens, END)
        answers = {way: [asked.answer(urls[way], how, seed) for seed in seeds] for way, how in WAYS.items()}
    same = ("token-wise", f"token-wise, {PRIVATE}", "sequence-wise", "chain", "tree", f"tree, {PRIVATE}")
    comparable = [answers[way] for way in same]
    for others in zip(*comparable, strict=True):
        if len({answer.text for answer in others}) != 1:
            raise AssertionError("drafts have changed an answer")
    return answers


def _rows(
    pace: str, forward: Mapping[Side, float], trip: float, answers: Mapping[str, list[Answer]]
) -> Iterator[dict[str, object]]:
    for way, measured in answers.items():
        alpha = _acceptance(measured, "cloud")
        row: dict[str, object] = {
            "pace": pace,
            "rtt_s": trip,
            "way": way,
            "s_per_token": statistics.median(answer.per_token for answer in measured),
            "lowest": min(answer.per_token for answer in measured),
            "highest": max(answer.per_token for answer in measured),
            "acceptance_cloud": alpha,
            "acceptance_device": _acceptance(measured, "device"),
            "handovers": sum(answer.stats.get("handovers", 0.0) for answer in measured),
        }
        if way == "chain" and alpha is not None:
            # Theorem 3 with the measured acceptance: the paper's predicted speed-up over token-wise.
            row["theorem_3"] = 1.0 / speed_up(forward["device"], forward["cloud"], trip, alpha)
        yield row


def _acceptance(answers: list[Answer], side: Side) -> float | None:
    """Acceptance rate of this side's first drafts."""
    drafted = sum(answer.stats.get(f"drafted_{side}", 0.0) for answer in answers)
    return sum(answer.stats.get(f"accepted_{side}", 0.0) for answer in answers) / drafted if drafted else None


def _claims(measured: Mapping[tuple[str, float], Mapping[str, list[Answer]]]) -> Iterator[Claim]:
    """The worst over both paces, and over both privacy levels where a pair of ways has both."""
    trips = sorted({trip for _, trip in measured})
    far, near = max(trip for trip in trips if trip <= MAX_CLAIMED), [trip for trip in trips if trip <= MAX_NEAR]

    def worst(pairs: Sequence[tuple[str, str]], at: Sequence[float]) -> Estimate:
        return worst_of(
            (
                ratio_of(*([answer.per_token for answer in measured[pace, trip][way]] for way in pair))
                for pair in pairs
                for pace in PACES
                for trip in at
            ),
            "lower",
        )

    private = f"tree, {PRIVATE}"
    for name, pairs, at, target, paper in (
        (
            "vs_token_wise_300ms",
            [("tree", "token-wise"), (private, f"token-wise, {PRIVATE}")],
            [far],
            0.3,
            "0.576 (OPT), 0.803 (Qwen)",
        ),
        (
            "vs_sequence_wise_300ms",
            [("tree", "sequence-wise"), (private, "sequence-wise")],
            [far],
            0.3,
            "0.505 (OPT), 0.568 (Qwen)",
        ),
        ("private_vs_open_300ms", [(private, "tree")], [far], 1.3, None),
        ("chain_vs_token_wise_300ms", [("chain", "token-wise")], [far], 0.5, None),
        ("tree_vs_chain", [("tree", "chain")], [far], 0.65, None),
        ("overhead_50ms", [("tree", "device only"), (private, "device only")], near, 1.1, "1.156 to 1.203"),
        ("vs_device_default_50ms", [(way, "device only, lookup_tree") for way in ("tree", private)], near, 1.35, None),
    ):
        yield claimed(f"aggregate.{name}", worst(pairs, at), target, "lower", paper)


def _size_claims(sizes: list[dict[str, object]]) -> Iterator[Claim]:
    median = {str(row["way"]): float(str(row["bytes"])) for row in sizes}
    yield Claim("aggregate.bytes_per_token_mixture", median["mixture, top_p 0.95"], 128, "lower", "under 512")
    yield Claim("aggregate.bytes_per_token_mixture_top_p_1", median["mixture, top_p 1"], 512, "lower")
    yield Claim("aggregate.bytes_per_token_coin", median["coin"], 16, "lower")


def plot(report: Report) -> str:
    """Plot seconds per token over the round trip, for the device ten times slower."""
    shown = [row for row in report.rows if row.get("pace") == "device 10x slower"]
    by_trip: dict[object, dict[str, object]] = {}
    for row in shown:
        by_trip.setdefault(row["rtt_s"], {"rtt_s": row["rtt_s"]})[str(row["way"])] = row["s_per_token"]
    return lines(list(by_trip.values()), x="rtt_s", ys=list(WAYS), unit="s per token", title=NAME)
