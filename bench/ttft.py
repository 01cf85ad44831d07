"""`paceline bench ttft`: time to the first token with stored document KV, against recomputing and transferring it.

Device and cloud hold a document each. Two nodes of the program, with real searches and link messages, over an emulated
network; the device's forwards are real, the cloud's take a given time (reasons: `bench.aggregation.two_process_rig`).
The baselines run on the device's engine and a second connection with the same emulation, over which every byte they
need is serialised and sent. Names of the baselines are DRAGON's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from paceline.core.aggregation.weights import mix
from paceline.core.batching.kv_prefix import KvPrefix
from paceline.core.batching.segment import Segment
from paceline.core.sampling.dist import Dist
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side
from paceline.engine.base import TextModel
from paceline.engine.tokenizer import Tokenizer
from paceline.errors import EngineError
from paceline.models import DEVICE
from paceline.rag.prompt import passages_text, query_of, relevance
from paceline.rag.records import Passage
from paceline.runtime.engine_loop.document_prefill import kv_key
from paceline.runtime.engine_loop.prefix_reuse import StoredPrefix
from paceline.runtime.engine_loop.requests import Rows, SequenceOp
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.service import GenerateRequest, TextDelta

from .aggregation.two_process_rig import DeviceSide, EmulatedForward, Setting, Shape, two_sides
from .report import Claim, Options, Report, plot_lines

NAME = "ttft"
SUMMARY = "time to first token with stored document KV, against recomputing it and sending it"

QUESTION = "When does the old harbour museum open, and where is the key of the red boat?"
MESSAGES = ({"role": "user", "content": QUESTION},)
WORDS: Mapping[Side, str] = {
    "cloud": "The old harbour museum opens at nine and shows the red boat to all visitors of the town.",
    "device": "The key of the red boat lies under the flat stone behind the old harbour wall near my house.",
}
MBIT = 1e6
SMALL = Shape()
TENTH = EmulatedForward()  # about a tenth of the device's time for the forward of a question
PAUSE_S = 0.3  # between two questions, so that drafts of the previous one have ended


@dataclass(frozen=True, slots=True)
class Regime:
    documents: int  # tokens of each side's document
    rate: float  # bit/s
    rtt: float  # s


# The claims hold for the first: the paper's bandwidth, and its context of 256 tokens on each side. Each of the others
# changes one parameter: 256 tokens on both sides together, a slower link, a round trip that the device's time to the
# first token cannot hide.
REGIMES = (
    Regime(256, 100 * MBIT, 0.02),
    Regime(128, 100 * MBIT, 0.02),
    Regime(256, 25 * MBIT, 0.02),
    Regime(256, 100 * MBIT, 0.1),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Models, regimes and rounds. The cloud's timing represents the device's model on a faster machine."""

    device: Shape = SMALL
    cloud: EmulatedForward = TENTH
    regimes: tuple[Regime, ...] = REGIMES
    rounds: int = 25
    yields: bool = True  # see `Setting`; on a busy machine such a cloud may never be scheduled


QUICK = Workload(regimes=REGIMES[:1], rounds=5)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Measurement of a first token."""

    seconds: float  # since the question
    rows: int  # computed on the device before it, drafts included
    fetched: int = 0  # bytes of the cloud's document, as text or as KV


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # one for each engine, so that the two sides do not compete for cores
    try:
        rows = asyncio.run(_all(load))
    finally:
        torch.set_num_threads(before)
    times = {way: float(str(row["times_ours"])) for way, row in zip(WAYS, rows, strict=False)}
    claims = (
        Claim("ttft.vs_device_only", 1.0 / times["device only"], 1.1, "lower", "negligible overhead"),
        Claim("ttft.vs_recompute", times["DRCG/Text"], 8.6, "higher", "8.6x on average"),
        Claim("ttft.vs_kv_transfer", times["DRCG/KV"], 15.3, "higher", "15.3x, OPT-1.3B; 2.7x, Qwen2.5-1.5B"),
    )
    conditions = {
        "clock": "emulated: shaped link, paced cloud; the device's engine and all searches in real time, a thread each",
        "device_model": f"random Llama, {load.device.summary}, bfloat16",
        "cloud_model": f"arbitrary distributions; a forward is {load.cloud.summary}, slept, off this machine's cores",
        "kv_bytes_per_token": load.device.row_bytes,
        "processes": "two; what the baselines fetch is sent by the cloud's",
        "branches": "one document on each side",
        "claims_for": "the first regime of the rows",
        "papers_regime": "100 Mbit/s; contexts of 256 tokens; its KV of 114 MB is float32 and of the whole prompt",
        "statistic": f"medians of {load.rounds} rounds, all ways in turn; of what ours takes in the same round, too",
        "temperature": 0,
        "quick": options.quick,
    }
    return Report(NAME, conditions, rows, claims)


def plot(report: Report, file: Path) -> None:
    rows: dict[str, dict[str, object]] = {}
    for row in report.rows:
        regime = f"{row['document_tokens']} tokens\n{row['mbit_per_s']:g} Mbit/s\nRTT {row['rtt_ms']:g} ms"
        rows.setdefault(regime, {"regime": regime})[str(row["way"])] = row["ms"]
    plot_lines(
        replace(report, rows=list(rows.values())), file, x="regime", ys=tuple(WAYS), unit="ms to the first token"
    )


async def _all(load: Workload) -> list[dict[str, object]]:
    tokenizer = Tokenizer.load(DEVICE)
    rows: list[dict[str, object]] = []
    for regime in load.regimes:
        texts = {side: _text(WORDS[side], regime.documents, tokenizer) for side in SIDES}
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            emulation = Emulation(rtt=regime.rtt, rate=regime.rate)
            setting = Setting(Path(folder), load.device, load.cloud, texts, emulation, load.yields)
            async with two_sides(setting) as side:
                bench = _Bench(side, load.device)
                setting.prepared.write_bytes(await bench.prepared())
                rows += await _measured(bench, load.rounds, regime)
    return rows


def _text(words: str, tokens: int, tokenizer: TextModel) -> str:
    """Repeat the words up to `tokens` tokens."""
    text = ""
    for word in cycle(words.split()):
        longer = f"{text} {word}".strip()
        if len(tokenizer.encode(longer)) > tokens:
            return text
        text = longer
    raise AssertionError("a cycle does not end")


async def _measured(bench: _Bench, rounds: int, regime: Regime) -> list[dict[str, object]]:
    """A row for each method. One of each per round, so that a change of the machine's speed affects all alike."""
    measured: dict[str, list[FirstToken]] = {way: [] for way in WAYS}
    for round_index in range(rounds + 1):
        for way, answer in WAYS.items():
            first = await answer(bench)
            await asyncio.sleep(PAUSE_S)
            if round_index:  # the first round is a warm-up
                measured[way].append(first)
    rows: list[dict[str, object]] = []
    for way, firsts in measured.items():
        times = [1e3 * first.seconds for first in firsts]
        ratios = [first.seconds / ours.seconds for first, ours in zip(firsts, measured["ours"], strict=True)]
        rows.append(
            {
                "way": way,
                "document_tokens": regime.documents,
                "mbit_per_s": regime.rate / MBIT,
                "rtt_ms": 1e3 * regime.rtt,
                "ms": statistics.median(times),
                "low_ms": min(times),
                "high_ms": max(times),
                "times_ours": statistics.median(ratios),
                "device_rows": firsts[0].rows,
                "fetched_bytes": firsts[0].fetched,
            }
        )
    return rows


@dataclass(frozen=True, slots=True)
class _Fetched:
    text: str
    relevance: float
    kv: bytes
    num_bytes: int  # of the whole message


class _Bench:
    """The device side, which runs all methods."""

    def __init__(self, side: DeviceSide, shape: Shape) -> None:
        self.shape = shape
        self.side, self.worker, self.model = side, side.node.worker, side.model
        self.asked = 0  # questions answered by the node
        self.textless = dict.fromkeys(_textless(self.model.tokenizer), -100.0)

    def search(self, side: Side = "device") -> Passage:
        (passage,) = self.side.stores[side].search(query_of(MESSAGES), 1)
        return passage

    def prompt(self, *texts: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(preamble and documents, full prompt)"""
        preamble, document, tail = self.model.tokenizer.document_prompt(MESSAGES, "\n".join(texts))
        return (*preamble, *document), (*preamble, *document, *tail)

    def stored(self, passage: Passage) -> StoredPrefix:
        """Stored KV of the device's document, as its node would find it."""
        tokens, _ = self.prompt(passages_text(passage))
        rows = self.side.files.get(kv_key(self.side.files, self.model.engine.info, passage, tokens))
        if rows is None:
            raise EngineError("the bench's document has no stored KV")
        return StoredPrefix(tokens, rows)

    async def forward(self, tokens: tuple[int, ...], prefix: StoredPrefix | None = None) -> Dist:
        """Distribution after a prompt, computed on the device."""
        seq = self.worker.allocate()
        answer: asyncio.Future[Rows | EngineError] = asyncio.get_running_loop().create_future()
        self.worker.forward(Segment(seq, 0, tokens), answer.set_result, prefix)
        result = await answer
        self.worker.control(SequenceOp.release(seq))
        if isinstance(result, EngineError):
            raise result
        (dist,) = result
        assert isinstance(dist, Dist)
        return dist

    async def fetch(self, *, kv: bool) -> _Fetched:
        """The cloud's passage, over the second connection, on request with its KV."""
        await self.side.wire.send_bytes(json.dumps({"kv": kv, "query": query_of(MESSAGES)}).encode())
        data = await self.side.wire.recv_bytes()
        first_line, _, body = data.partition(b"\n")
        header = json.loads(first_line)
        return _Fetched(header["text"], header["relevance"], body, len(data))

    async def prepared(self) -> bytes:
        """KV of the cloud's document, computed by the device's model: K, then V, in bfloat16."""
        prefix, tokens = self.prompt(passages_text(self.search("cloud")))
        rows: asyncio.Future[KvPrefix] = (loop := asyncio.get_running_loop()).create_future()

        def keep(kept: KvPrefix) -> None:
            loop.call_soon_threadsafe(rows.set_result, kept)

        await self.forward(tokens, StoredPrefix(prefix, keep=keep))
        return (await rows).keys.tobytes() + (await rows).values.tobytes()

    async def written(self, strategy: str) -> FirstToken:
        """Answer by the program's node, up to the first text event."""
        sampling = SamplingParams(temperature=0.0, logit_bias=self.textless)
        self.asked += 1  # another owner each time: the prompt must not be in the prefix cache
        request = GenerateRequest(
            MESSAGES, sampling, 16, strategy=strategy, documents=1, owner=f"question {self.asked}"
        )
        steps = self.worker.steps
        rows, adopted, start = steps.rows, steps.adopted, time.perf_counter()
        session = await self.side.node.prepare(request)
        try:
            async for event in session.run():
                if not isinstance(event, TextDelta) or event.tokens != 1:
                    raise EngineError(f"the first event is no first token: {event}")
                seconds = time.perf_counter() - start
                computed = steps.rows - rows
                if not steps.adopted - adopted:
                    raise EngineError("stored KV was not used")
                return FirstToken(seconds, computed)
        finally:
            await session.aclose()
        raise EngineError("an answer has no text")


async def _device_only(bench: _Bench) -> FirstToken:
    return await bench.written("autoregressive")


async def _ours(bench: _Bench) -> FirstToken:
    return await bench.written("aggregate")


async def _recomputed(bench: _Bench) -> FirstToken:
    """DRCG/Text: the cloud sends its passage as text, and the device prefills both documents in one context."""
    start = time.perf_counter()
    own, other = await asyncio.gather(asyncio.to_thread(bench.search), bench.fetch(kv=False))
    _, tokens = bench.prompt(other.text, passages_text(own))
    _token(bench, await bench.forward(tokens))
    return FirstToken(time.perf_counter() - start, len(tokens), other.num_bytes)


async def _transferred(bench: _Bench) -> FirstToken:
    """DRCG/KV: the cloud sends its passage's KV for the device's model; the tail is prefilled after each document."""
    start = time.perf_counter()

    async def from_own_document() -> tuple[float, Dist]:
        passage = await asyncio.to_thread(bench.search)
        _, tokens = bench.prompt(passages_text(passage))
        return relevance(passage), await bench.forward(tokens, await asyncio.to_thread(bench.stored, passage))

    own, other = await asyncio.gather(from_own_document(), bench.fetch(kv=True))
    prefix, tokens = bench.prompt(other.text)
    shape, info = bench.shape, bench.model.engine.info
    keys, values = np.frombuffer(bytearray(other.kv), "<u2").reshape(
        2, shape.layers, len(prefix), shape.kv_heads, shape.hidden // shape.heads
    )
    dist = await bench.forward(
        tokens, StoredPrefix(prefix, KvPrefix(info.fingerprint, info.dtype, prefix, keys, values))
    )
    _token(bench, mix([own[1], dist], [own[0], other.relevance]))
    return FirstToken(time.perf_counter() - start, 2 * (len(tokens) - len(prefix)), other.num_bytes)


def _textless(tokenizer: TextModel) -> Iterator[int]:
    """Tokens that are not text by themselves. A random model must not begin with one: the first text would be late."""
    for token in range(tokenizer.vocab_size):
        try:
            if not tokenizer.token_bytes(token).decode():
                yield token
        except UnicodeDecodeError:
            yield token


def _token(bench: _Bench, dist: Dist) -> str:
    return bench.model.tokenizer.decode([int(dist.ids[np.argmax(dist.probs)])])


WAYS: Mapping[str, Callable[[_Bench], Awaitable[FirstToken]]] = {
    "device only": _device_only,
    "ours": _ours,
    "DRCG/Text": _recomputed,
    "DRCG/KV": _transferred,
}
