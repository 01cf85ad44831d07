"""`paceline bench aggregate`: time per token of joint answers against the round trip, on real processes.

A server and an agent, linked over an emulated network. Their engines are the seeded table model, delayed so that a
forward takes a given time on any machine. Answers are streamed by the agent and timed at the client. All modes run in
turn in the same pair of processes: token by token, whole sequences, chains of drafts (DRAGON as published), trees, and
each side alone (the cloud called directly, not over the link). The texts are compared as well: drafts change no token.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from paceline.core.aggregation.placement import speed_up
from paceline.core.side import Side

from .aggregation import live_placement, payload_bytes, session_bytes
from .aggregation.process_pair import linked_pair
from .report import Claim, Options, Report, plot_lines

NAME = "aggregate"
SUMMARY = "time per token of joint answers against the round trip, 0-600 ms, on real processes"

PACES: Mapping[str, Mapping[Side, float]] = {
    "device 10x slower": {"cloud": 0.006, "device": 0.06},
    "equal": {"cloud": 0.03, "device": 0.03},
}
ROUND_TRIPS = (0.05, 0.1, 0.2, 0.3, 0.6)  # s; the jitter is a fifth of it
CLOUD_ONLY = "cloud only"
WAYS: Mapping[str, Mapping[str, object]] = {
    # Trees first, before their look-up tables have seen another mode's answer to the same question and seed.
    "tree": {"strategy": "aggregate", "drafts": "tree", "aggregator": "mixture"},
    "tree, document-private": {
        "strategy": "aggregate",
        "drafts": "tree",
        "aggregator": "mixture",
        "privacy": "document-private",
    },
    "tree, coin": {"strategy": "aggregate", "drafts": "tree", "aggregator": "coin"},
    "device only": {"strategy": "autoregressive"},
    "device only, lookup_tree": {"strategy": "lookup_tree"},
    CLOUD_ONLY: {"strategy": "autoregressive"},
    "token-wise": {"strategy": "aggregate", "drafts": "none", "aggregator": "mixture"},
    "sequence-wise": {"strategy": "aggregate", "drafts": "sequence", "aggregator": "mixture"},
    "chain": {"strategy": "aggregate", "drafts": "chain", "aggregator": "mixture"},
    "chain, paper": {"strategy": "aggregate", "drafts": "chain", "aggregator": "paper"},
}
MODEL = "fake:1:0.6"  # with this spread the sides accept about three of four drafts
MAX_CLAIMED = 0.3  # s, the longest round trip of the claims; beyond it token-wise answers only take time
# s; up to this round trip the overhead over the device alone is claimed, from more answers, since they vary much.
MAX_NEAR = 0.05
NEAR_FACTOR = 4  # times as many answers


@dataclass(slots=True)
class Answer:
    """One streamed answer."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0  # between the first and the last delta
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def per_token(self) -> float:
        return self.seconds / max(1, self.tokens - 1)


def run(options: Options) -> Report:
    tokens, count = 32, (1 if options.quick else 2)
    trips = (0.05, 0.3) if options.quick else ROUND_TRIPS
    rows: list[dict[str, object]] = []
    for pace, forward in PACES.items():
        for trip in trips:
            seeds = tuple(range(1, 1 + (NEAR_FACTOR * count if trip <= MAX_NEAR else count)))
            rows += _measure(pace, forward, trip, tokens, seeds)
    sizes = payload_bytes.rows(20 if options.quick else 100)
    session = session_bytes.rows(1 if options.quick else 3, tokens, (MAX_NEAR, MAX_CLAIMED))
    placement = live_placement.measure(live_placement.QUICK if options.quick else live_placement.Load())
    conditions = {
        "clock": "emulated: real processes, shaped link, paced engines",
        "model": f"{MODEL} (table model over bytes), one document a side, temperature 1",
        "forward_s": {pace: dict(forward) for pace, forward in PACES.items()},
        "row_s": ROW_S,
        "jitter": "a fifth of the round trip",
        "privacy": "open, but where a way names its level",
        "tokens": tokens,
        "answers": f"{count} each, {NEAR_FACTOR * count} at {1e3 * MAX_NEAR:g} ms and less",
        "client": "httpx at the agent, loopback; for the cloud alone at the cloud",
        "session bytes": "all messages of an answer but its opening, in virtual time (aggregation/session_bytes.py)",
        "placement": "the decision live and kept on either side, in virtual time (aggregation/live_placement.py)",
        "intervals": placement.intervals,
        "bytes": f"of a message with one node, synthetic, {payload_bytes.VOCAB} ids (aggregation/payload_bytes.py)",
    }
    claims = (*_claims(rows), *_size_claims(sizes), *_session_claims(session), *placement.claims)
    return Report(NAME, conditions, rows + sizes + session + placement.rows, claims)


WARM_UP = 16  # tokens of an answer under each aggregator that is not measured: it calibrates both sides' speed
ROW_S = 0.0003  # s, time of each further row of a forward: for the slow device 16 rows take 1.08 times one row


def _measure(
    pace: str, forward: Mapping[Side, float], trip: float, tokens: int, seeds: tuple[int, ...]
) -> list[dict[str, object]]:
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
            _ask(pair.device.url, WAYS[way], WARM_UP, 99)
        urls = {way: (pair.cloud if way == CLOUD_ONLY else pair.device).url for way in WAYS}
        answers = {way: [_ask(urls[way], how, tokens, seed) for seed in seeds] for way, how in WAYS.items()}
    same = ("token-wise", "sequence-wise", "chain", "tree", "tree, document-private")
    comparable = [answers[way] for way in same]
    for others in zip(*comparable, strict=True):
        if len({answer.text for answer in others}) != 1:
            raise AssertionError("drafts have changed an answer")
    return list(_rows(pace, forward, trip, answers))


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


def _ask(url: str, how: Mapping[str, object], tokens: int, seed: int) -> Answer:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "What is there to know of the harbour library of Tarnwick?"}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": seed,
        "logit_bias": {"256": -100},  # the end token is banned: every answer has the same length
        "stream": True,
        "stream_options": {"include_usage": True},
        "paceline": {"report": True, "privacy": "open", **how},
    }
    answer = Answer()
    first = last = 0.0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120.0, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            delta = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if delta:
                last = time.perf_counter()
                first = first or last
                answer.text += delta
            if event.get("usage"):
                answer.tokens = int(event["usage"]["completion_tokens"])
            report = event.get("paceline") or {}
            answer.stats.update(report.get("stats", {}))
    answer.seconds = last - first
    return answer


def _claims(rows: list[dict[str, object]]) -> Iterator[Claim]:
    """The worst over both paces, at an acceptance rate of about 0.75 or more."""

    def seconds(pace: str, trip: float, way: str) -> float:
        row = next(row for row in rows if (row["pace"], row["rtt_s"], row["way"]) == (pace, trip, way))
        value = row["s_per_token"]
        assert isinstance(value, float)
        return value

    trips = sorted({float(str(row["rtt_s"])) for row in rows})
    far, near = max(trip for trip in trips if trip <= MAX_CLAIMED), [trip for trip in trips if trip <= MAX_NEAR]
    for name, way, against, target, paper in (
        ("vs_token_wise_300ms", "tree", "token-wise", 0.3, "0.576 (OPT), 0.803 (Qwen)"),
        ("vs_sequence_wise_300ms", "tree", "sequence-wise", 0.3, "0.505 (OPT), 0.568 (Qwen)"),
        ("private_vs_open_300ms", "tree, document-private", "tree", 1.3, None),
        ("chain_vs_token_wise_300ms", "chain", "token-wise", 0.5, None),
        ("tree_vs_chain", "tree", "chain", 0.65, None),
    ):
        value = max(seconds(pace, far, way) / seconds(pace, far, against) for pace in PACES)
        yield Claim(f"aggregate.{name}", value, target, "lower", paper)
    overhead = max(seconds(pace, trip, "tree") / seconds(pace, trip, "device only") for pace in PACES for trip in near)
    yield Claim("aggregate.overhead_50ms", overhead, 1.1, "lower", "1.156 to 1.203")


def _size_claims(sizes: list[dict[str, object]]) -> Iterator[Claim]:
    median = {str(row["way"]): float(str(row["bytes"])) for row in sizes}
    yield Claim("aggregate.bytes_per_token_mixture", median["mixture, top_p 0.95"], 128, "lower", "under 512")
    yield Claim("aggregate.bytes_per_token_mixture_top_p_1", median["mixture, top_p 1"], 512, "lower")
    yield Claim("aggregate.bytes_per_token_coin", median["coin"], 16, "lower")


def _session_claims(rows: list[dict[str, object]]) -> Iterator[Claim]:
    """The worst pace, round trip and level."""
    for aggregator, aim in (("mixture", 256.0), ("coin", 32.0)):
        worst = max(float(str(row["bytes"])) for row in rows if f", {aggregator}, " in str(row["way"]))
        yield Claim(f"aggregate.session_bytes_{aggregator}", worst, aim, "lower")


def plot(report: Report, file: Path) -> None:
    """Plot seconds per token over the round trip, for the device ten times slower."""
    shown = [row for row in report.rows if row.get("pace") == "device 10x slower"]
    by_trip: dict[object, dict[str, object]] = {}
    for row in shown:
        by_trip.setdefault(row["rtt_s"], {"rtt_s": row["rtt_s"]})[str(row["way"])] = row["s_per_token"]
    plot_lines(Report(NAME, {}, list(by_trip.values())), file, x="rtt_s", ys=list(WAYS), unit="s per token")
