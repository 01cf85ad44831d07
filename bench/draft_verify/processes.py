"""Two processes over an emulated link: the node that serves at the device, and a cloud, on prompts of GSM8K.

The models are the demo pair, whose forwards are padded to stated times: its own, and those that Qwen2.5-0.5B's and
1.5B's weights take to be read at 30 GB/s on both sides. Emulated clock: what is computed is computed, by one thread
each, and runs at the speed of this machine where that is slower than the stated time; `device_forward_ms` and
`ms_per_token` of cloud decoding show it. Ways take turns within a round, in an order that turns as well.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import Side
from paceline.engine.base import LoadedModel, delay_forwards
from paceline.engine.loader import load_model
from paceline.errors import ConfigError, EngineError
from paceline.models import CLOUD, DEVICE
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.service import (
    Account,
    AskedPrompt,
    GenerateRequest,
    GenerationResult,
    OutputForm,
    TextDelta,
)
from paceline.strategies.base import Wish

from ..aggregation.two_process_rig import DeviceSide, EmulatedForward, Setting, Shape, two_sides
from ..bootstrap import Estimate, ratio_of
from ..findings import Findings
from ..report import Claim
from .answers import COMPUTE_W

MBIT: Final = 1e6
QUESTIONS: Final = (  # where no evaluation set is given
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many loaves does she sell?",
    "Tom has 5 boxes of 12 pencils and gives away 17 pencils. How many pencils does he have left?",
    "A train travels 60 km in the first hour and 45 km in the second. How far does it travel in both hours?",
)
STATIC: Final = "static 7"
STATIC_TWICE: Final = "static 7 with second guesses"
PLAIN: Final = "cloud decoding"
OURS: Final = "ours"
WAYS: Final[Mapping[str, Mapping[str, object]]] = {
    OURS: {},
    "ours, cloud waits": {"waits": True, "most": 4},
    STATIC: {"waits": True, "overlap": False, "fixed": True, "most": 7, "second_guesses": False},  # as published
    STATIC_TWICE: {"waits": True, "overlap": False, "fixed": True, "most": 7},
    PLAIN: {"most": 0},
}


@dataclass(frozen=True, slots=True)
class Pace:
    """Least seconds of a forward, and of each further row."""

    name: str
    device_s: float
    cloud_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class Load:
    paces: Sequence[Pace] = (Pace("demo pair", 0.010, 0.030, 0.0003), Pace("0.5B and 1.5B", 0.033, 0.103, 0.001))
    rates: Sequence[float] = (1 * MBIT, 50 * MBIT)  # bit/s
    round_trips: Sequence[float] = (0.005, 0.05, 0.2)  # s
    temperature: float = 0.0
    tokens: int = 48
    rounds: int = 5


QUICK: Final = Load((Pace("demo pair", 0.005, 0.015, 0.0),), (50 * MBIT,), (0.02,), 0.0, 12, 2)


@dataclass(frozen=True, slots=True)
class PairSetting(Setting):
    """Settings of both processes with the demo pair."""

    pace: Pace = field(default=Pace("", 0.0, 0.0, 0.0))

    def model(self, side: Side) -> LoadedModel:
        loaded = load_model(str(CLOUD if side == "cloud" else DEVICE), threads=1)
        seconds = self.pace.cloud_s if side == "cloud" else self.pace.device_s
        return replace(loaded, engine=delay_forwards(loaded.engine, seconds, self.pace.row_s))


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    seconds: float  # from the request to the last token, at the device
    tokens: int
    stats: Mapping[str, float]


def questions(data: Path | None, count: int) -> list[str]:
    """Questions of GSM8K's test set, or the bench's own."""
    if data is None:
        return [QUESTIONS[index % len(QUESTIONS)] for index in range(count)]
    file = data / "gsm8k" / "test.jsonl"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: --data names the folder with the evaluation sets")
    with file.open(encoding="utf-8") as lines:
        found = [str(json.loads(line)["question"]) for line, _ in zip(lines, range(count), strict=False)]
    return [found[index % len(found)] for index in range(count)]


def measure(load: Load, data: Path | None = None) -> Findings:
    findings = Findings()
    asked = questions(data, load.rounds + 1)
    ratios: dict[str, list[tuple[float, float, Estimate]]] = {STATIC: [], PLAIN: []}
    drafted = sent = 0.0
    for pace in load.paces:
        for rtt in load.round_trips:
            for rate in load.rates:
                rounds = asyncio.run(_rounds(load, pace, Emulation(rtt=rtt, rate=rate), asked))
                findings.rows += _rows(pace, rtt, rate, rounds)
                for against, found in ratios.items():
                    slower = [each[against].seconds for each in rounds]
                    found.append((rtt, rate, ratio_of(slower, [each[OURS].seconds for each in rounds])))
                for each in rounds:
                    drafted += each[OURS].stats["drafted"]
                    sent += each[OURS].stats.get("sent_drafts_bytes", 0.0)
    far = max(load.round_trips)
    at_far = min((each for rtt, _, each in ratios[STATIC] if rtt == far), key=lambda each: each.value)
    anywhere = min((each for _, _, each in ratios[PLAIN]), key=lambda each: each.value)
    findings.claim(Claim("draft_verify.worst_link_vs_static7", at_far.value, 1.5, "higher"), at_far)
    findings.claim(Claim("draft_verify.vs_cloud_decoding", anywhere.value, 0.97, "higher"), anywhere)
    findings.claim(Claim("draft_verify.uplink_bytes_per_draft", sent / drafted, 4.0, "lower"))
    return findings


async def _rounds(load: Load, pace: Pace, emulation: Emulation, asked: Sequence[str]) -> list[dict[str, Answer]]:
    """One answer of each way in a round; the first round is a warm-up."""
    rounds = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        documents: dict[Side, str] = {"cloud": "nothing", "device": "nothing"}  # the rig waits for their KV; not read
        setting = PairSetting(Path(folder), Shape(), EmulatedForward(), documents, emulation, False, pace)
        async with two_sides(setting) as side:
            names = list(WAYS)
            for number, question in enumerate(asked):
                turn = number % len(names)
                found = {
                    name: await _answer(side, question, WAYS[name], load, f"{number} {name}")
                    for name in (*names[turn:], *names[:turn])
                }
                if len({answer.text for answer in found.values()}) != 1:
                    raise EngineError("drafts have changed an answer")
                rounds.append(found)
    return rounds[1:]


async def _answer(side: DeviceSide, question: str, options: Mapping[str, object], load: Load, owner: str) -> Answer:
    """owner: another for each answer, so that no prompt or n-gram is cached."""
    banned = dict.fromkeys(side.model.tokenizer.eos_ids, -100.0)
    sampling = SamplingParams(temperature=load.temperature, seed=7, logit_bias=banned)
    request = GenerateRequest(
        AskedPrompt(({"role": "user", "content": question},)),
        Wish("draft_verify", sampling, "open", options, documents=0),
        OutputForm(load.tokens),
        account=Account(owner=owner),
    )
    start = last = time.perf_counter()
    session, text = await side.node.prepare(request), ""
    async for event in session.run():
        if isinstance(event, TextDelta):
            last, text = time.perf_counter(), text + event.text
        elif isinstance(event, GenerationResult):
            if event.degraded is not None or event.strategy != "draft_verify":
                raise EngineError(f"an answer was written by {event.strategy}, {event.degraded}")
            return Answer(text, last - start, event.completion_tokens, event.stats)
    raise EngineError("an answer has no end")


def _rows(pace: Pace, rtt: float, rate: float, rounds: Sequence[Mapping[str, Answer]]) -> Iterable[dict[str, object]]:
    for name in WAYS:
        answers = [each[name] for each in rounds]
        tokens = sum(answer.tokens for answer in answers)
        total = {key: sum(answer.stats.get(key, 0.0) for answer in answers) for key in _COUNTED}
        yield {
            "part": "processes",
            "pace": pace.name,
            "way": name,
            "rtt_ms": 1e3 * rtt,
            "mbit_per_s": rate / MBIT,
            "tokens_per_s": tokens / sum(answer.seconds for answer in answers),
            "times_cloud_decoding": ratio_of(
                [each[PLAIN].seconds for each in rounds], [answer.seconds for answer in answers]
            ).value,
            "joules_per_token": COMPUTE_W * pace.device_s * total["forwards"] / tokens,
            "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else None,
            "bytes_per_draft": total["sent_drafts_bytes"] / total["drafted"] if total["drafted"] else None,
        }


_COUNTED: Final = ("forwards", "drafted", "accepted", "sent_drafts_bytes")
