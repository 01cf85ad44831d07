"""`paceline bench ttft`: time to the first token with stored document KV, against recomputing and transferring it.

Device and cloud hold a document each. Two nodes of the program, with real searches and link messages, over an emulated
network. The device's forwards are real, and so are the cloud's in the regime of the claims; in the others they only
take a given time (reasons: `bench.aggregation.two_process_rig`). The program is asked over HTTP on loopback, by a
client in the device's process. The baselines run on the device's engine without HTTP, and a second connection with the
same emulation, over which every byte they need is serialised and sent. Names of the baselines are DRAGON's.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import httpx
import torch

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.api.http.routing import Settings
from paceline.api.http.server import listen, serve, url_of
from paceline.core.side import SIDES, Side
from paceline.engine.base import Engine, TextModel
from paceline.engine.tokenizer import Tokenizer
from paceline.models import DEVICE
from paceline.runtime.link.emulation import Emulation

from .aggregation.two_process_rig import (
    DeviceSide,
    EmulatedForward,
    PinnedEngine,
    Setting,
    Shape,
    random_engine,
    two_sides,
)
from .bootstrap import medians_apart
from .findings import claimed
from .first_token import WAYS, DeviceBench, FirstToken
from .plots import bars
from .report import Options, Report

NAME = "ttft"
SUMMARY = "time to first token with stored document KV, against recomputing it and sending it"

WORDS: Mapping[Side, str] = {
    "cloud": "The old harbour museum opens at nine and shows the red boat to all visitors of the town.",
    "device": "The key of the red boat lies under the flat stone behind the old harbour wall near my house.",
}
MBIT = 1e6
SMALL = Shape()
TENTH = EmulatedForward()  # about a tenth of the device's time for the forward of a question


QUARTER = Shape(layers=4)


@dataclass(frozen=True, slots=True)
class ComputedForward(EmulatedForward):
    """A cloud that computes its forwards, on the last core: a model with a quarter of the device's layers.

    It stands for a faster machine, but takes caches and memory bandwidth from the device, as no cloud does.
    """

    shape: Shape = QUARTER

    @property
    def summary(self) -> str:
        return f"computed on this machine, {self.shape.summary}"

    def engine(self, vocab_size: int) -> Engine:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        return PinnedEngine(random_engine(self.shape, vocab_size, "bench cloud"), cores[-1])


COMPUTED = ComputedForward()
PAUSE_S = 0.3  # between two questions, so that drafts of the previous one have ended


@dataclass(frozen=True, slots=True)
class Regime:
    documents: int  # tokens of each side's document
    rate: float  # bit/s
    rtt: float  # s
    cloud: EmulatedForward = TENTH


# The claims are of the first: the paper's bandwidth, its context of 256 tokens on each side, and a cloud that computes.
# Each of the others changes one parameter of the second: 256 tokens on both sides together, a slower link, a round trip
# that the device's time to the first token cannot hide.
REGIMES = (
    Regime(256, 100 * MBIT, 0.02, COMPUTED),
    Regime(256, 100 * MBIT, 0.02),
    Regime(128, 100 * MBIT, 0.02),
    Regime(256, 25 * MBIT, 0.02),
    Regime(256, 100 * MBIT, 0.1),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Model, regimes and rounds."""

    device: Shape = SMALL
    regimes: tuple[Regime, ...] = REGIMES
    rounds: int = 25
    yields: bool = True  # see `Setting`; on a busy machine such a cloud may never be scheduled


QUICK = Workload(regimes=REGIMES[:1], rounds=5)


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # one for each engine, so that the two sides do not compete for cores
    try:
        rows, first = asyncio.run(_all(load))
    finally:
        torch.set_num_threads(before)
    against = {way: medians_apart(first[way], first["ours"]) for way in WAYS}
    overhead = medians_apart(first["ours"], first["device only"])
    published, kv = "8.6x on average", "15.3x, OPT-1.3B; 2.7x, Qwen2.5-1.5B"
    claims = (
        claimed("ttft.vs_device_only", overhead, 1.1, "lower", "negligible overhead"),
        claimed("ttft.vs_recompute", against["DRCG/Text"], 5.0, "higher"),
        claimed("ttft.vs_recompute_as_published", against["DRCG/Text, as published"], 8.6, "higher", published),
        claimed("ttft.vs_kv_transfer", against["DRCG/KV"], 15.3, "higher", kv),
    )
    conditions = {
        "clock": "emulated: shaped link, paced cloud; the device's engine and all searches in real time, a thread each",
        "device_model": f"random Llama, {load.device.summary}, bfloat16",
        "cloud_model": {
            regime.cloud.summary: "random weights"
            if isinstance(regime.cloud, ComputedForward)
            else "slept, off this machine's cores, arbitrary distributions"
            for regime in load.regimes
        },
        "kv_bytes_per_token": load.device.row_bytes,
        "processes": "two; what the baselines fetch is sent by the cloud's",
        "branches": "one document on each side",
        "claims_for": "the first regime of the rows",
        "papers_regime": "100 Mbit/s; contexts of 256 tokens; its KV of 114 MB is float32 and of the whole prompt",
        "http": "ours and the device alone, on loopback, the client in the device's process; the baselines without",
        "privacy": "the default of the device's own client, document-private",
        "statistic": f"ratios of medians of {load.rounds} rounds, all ways in turn",
        "interval_90": "both medians resampled, apart",
        "temperature": 0,
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def plot(report: Report) -> str:
    rows = [
        row | {"regime": f"{row['document_tokens']} tokens, {row['mbit_per_s']:g} Mbit/s, RTT {row['rtt_ms']:g} ms"}
        for row in map(dict, report.rows)
    ]
    return bars(rows, x="regime", group="way", y="ms", unit="ms to the first token", title=NAME)


async def _all(load: Workload) -> tuple[list[dict[str, object]], dict[str, list[float]]]:
    """Rows of all regimes, and the seconds of each way in the first."""
    tokenizer = Tokenizer.load(DEVICE)
    rows: list[dict[str, object]] = []
    first: dict[str, list[float]] = {}
    for regime in load.regimes:
        texts = {side: _text(WORDS[side], regime.documents, tokenizer) for side in SIDES}
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            emulation = Emulation(rtt=regime.rtt, rate=regime.rate)
            yields = load.yields and not isinstance(regime.cloud, ComputedForward)
            setting = Setting(Path(folder), load.device, regime.cloud, texts, emulation, yields)
            keys = tuple(f"question-{number:04}-of-this-bench" for number in range(2 * load.rounds + 2))
            async with two_sides(setting) as side, _served(side, keys) as client:
                bench = DeviceBench(side, load.device, client, keys)
                setting.prepared.write_bytes(await bench.prepared())
                more, seconds = await _measured(bench, load.rounds, regime)
                rows += more
                first = first or seconds
    return rows, first


@asynccontextmanager
async def _served(side: DeviceSide, keys: Sequence[str]) -> AsyncIterator[httpx.AsyncClient]:
    """The device's node behind its HTTP server, and a client of it."""
    app = create_app(side.node, Settings(documents=1), keyring=Keyring(dict.fromkeys(keys)))
    ready, stop = asyncio.Event(), asyncio.Event()

    async def stopped() -> None:
        await stop.wait()

    with closing(listen("127.0.0.1", 0)) as listener:
        server = asyncio.create_task(serve(app, listener, on_ready=ready.set, until=stopped))
        await ready.wait()
        try:
            async with httpx.AsyncClient(base_url=url_of(listener), timeout=60.0, trust_env=False) as client:
                yield client
        finally:
            stop.set()
            await server


def _text(words: str, tokens: int, tokenizer: TextModel) -> str:
    """Repeat the words up to `tokens` tokens."""
    text = ""
    for word in cycle(words.split()):
        longer = f"{text} {word}".strip()
        if len(tokenizer.encode(longer)) > tokens:
            return text
        text = longer
    raise AssertionError("a cycle does not end")


async def _measured(
    bench: DeviceBench, rounds: int, regime: Regime
) -> tuple[list[dict[str, object]], dict[str, list[float]]]:
    """A row for each method, and its seconds. One of each per round, so that a change of the machine's speed affects
    all alike."""
    measured: dict[str, list[FirstToken]] = {way: [] for way in WAYS}
    for round_index in range(rounds + 1):
        for way, answer in WAYS.items():
            first = await answer(bench)
            await asyncio.sleep(PAUSE_S)
            if round_index:  # the first round is a warm-up
                measured[way].append(first)
    rows: list[dict[str, object]] = []
    seconds = {way: [first.seconds for first in firsts] for way, firsts in measured.items()}
    for way, firsts in measured.items():
        times = [1e3 * first.seconds for first in firsts]
        against = medians_apart(seconds[way], seconds["ours"])
        rows.append(
            {
                "way": way,
                "document_tokens": regime.documents,
                "mbit_per_s": regime.rate / MBIT,
                "rtt_ms": 1e3 * regime.rtt,
                "cloud": "computed" if isinstance(regime.cloud, ComputedForward) else "emulated",
                "ms": statistics.median(times),
                "low_ms": min(times),
                "high_ms": max(times),
                "times_ours": against.value,
                "interval_90": against.interval,
                "device_rows": firsts[0].rows,
                "fetched_bytes": firsts[0].fetched,
            }
        )
    return rows, seconds
