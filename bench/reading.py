"""`paceline bench reading`: several passages in one context, with stored KV that was computed for each alone.

Questions of HotpotQA over four of their paragraphs, both that hold the answer among them, asked of a node with stored
KV: each way in turn, greedily. `together` computes all passages but the first; `reused` the first rows of each.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.training.texts import squad
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import WAYS_OF_READING, WayOfReading
from paceline.engine.base import LoadedModel
from paceline.errors import ConfigError
from paceline.rag.document_kv import FOLDER, DocumentKvStore
from paceline.rag.embedder import HashEmbedder
from paceline.rag.records import Passage
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from paceline.runtime.resources import Kept, NodeParts
from paceline.runtime.service import AskedPrompt, GenerateRequest, GenerationResult, OutputForm, Sources
from paceline.strategies.base import Wish

from .bootstrap import estimate, ratio_of
from .findings import claimed
from .handoff import stands
from .report import Options, Report

NAME = "reading"
SUMMARY = "several passages in one context, whose stored KV is reused: right answers, and time to the first token"
MODELS: Final = True
FEW, MANY = 4, 60  # questions
PASSAGES: Final = 4
LENGTH: Final = 32  # tokens of an answer at most
STORED: Final = 1 << 30  # bytes of KV
WAIT_S: Final = 0.5  # between looks at what has been computed ahead
BRIEFLY: Final = "Answer in as few words as you can."


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    paragraphs: Sequence[str]


@dataclass(frozen=True, slots=True)
class Given:
    """An answer."""

    text: str
    seconds: float  # to the first token
    rows: int  # computed of the prompt
    right: bool


def run(options: Options) -> Report:
    if options.models is None or options.data is None:
        raise ConfigError("bench reading asks a real model questions of a published set: give --models and --data.")
    asked = questions(options.data, FEW if options.quick else MANY)
    given = asyncio.run(answers(options.models.load("device"), asked))
    return reported(given, options.models.label, quick=options.quick)


def reported(given: Mapping[WayOfReading, Sequence[Given]], label: str, *, quick: bool) -> Report:
    plain, reused = given["together"], given["reused"]
    rows = [
        {
            "way": way,
            "right": sum(each.right for each in of),
            "n": len(of),
            "same_text_as_together": sum(a.text == b.text for a, b in zip(of, plain, strict=True)),
            "prompt_rows_computed": round(sum(each.rows for each in of) / len(of), 1),
            "ms_to_first_token": round(1e3 * sum(each.seconds for each in of) / len(of), 1),
        }
        for way, of in given.items()
    ]

    def right(among: Sequence[int]) -> float:
        return sum(reused[at].right for at in among) / max(1, sum(plain[at].right for at in among))

    quicker = ratio_of([each.seconds for each in plain], [each.seconds for each in reused])
    claims = (
        claimed("reading.reused_right", estimate(len(plain), right), None, "higher"),
        claimed("reading.reused_first_token", quicker, None, "higher"),
    )
    told = {"models": label, "temperature": 0.0, "passages": PASSAGES, "interval_90": "resampled questions"}
    return Report(NAME, told | {"quick": quick}, rows, claims)


def questions(data: Path, count: int) -> list[Question]:
    records = squad.records(data / "hotpotqa" / "hotpotqa.jsonl.gz")
    records = [each for each in records if each["answer"] not in ("yes", "no")]
    found: list[Question] = []
    for record in records[:: max(1, len(records) // count)][:count]:
        texts = {each["title"]: f"{each['title']}: {each['text']}" for each in record["context"]}
        gold = [text for title, text in texts.items() if title in record["gold_titles"]]
        others = [text for text in texts.values() if text not in gold][: PASSAGES - len(gold)]
        mixed = [*others[:1], *gold[:1], *others[1:], *gold[1:]]
        found.append(Question(f"{record['question']} {BRIEFLY}", record["answer"], mixed))
    return found


async def answers(model: LoadedModel, asked: Sequence[Question]) -> dict[WayOfReading, list[Given]]:
    """By every way in turn. KV of the passages is computed ahead, as while a node is idle."""
    given: dict[WayOfReading, list[Given]] = {way: [] for way in WAYS_OF_READING}
    with tempfile.TemporaryDirectory() as name, DocumentStore.open(Path(name), HashEmbedder()) as store:
        files = DocumentKvStore(Path(name) / FOLDER, STORED)
        for at, question in enumerate(asked):
            for number, text in enumerate(question.paragraphs):
                store.add_text(f"{at} {number}.md", text, zone="device")
        passages = store.passages(0, 1 << 16)
        async with Node("device", model, store, NodeParts(kept=Kept(kv=files))) as node:
            while len(files.groups()) < len({each.text for each in passages}):
                await asyncio.sleep(WAIT_S)
            for at, question in enumerate(asked):
                read = tuple(each for each in passages if each.document.startswith(f"{at} "))
                for way in WAYS_OF_READING if at % 2 else WAYS_OF_READING[::-1]:
                    given[way].append(await answer(node, question, read, way))
    return given


async def answer(node: Node, question: Question, read: tuple[Passage, ...], way: WayOfReading) -> Given:
    request = GenerateRequest(
        AskedPrompt(messages=({"role": "user", "content": question.text},)),
        Wish("autoregressive", SamplingParams(temperature=0.0), options={"reading": way}),
        OutputForm(max_tokens=LENGTH),
        Sources(passages=read),
    )
    began, first = time.perf_counter(), 0.0
    events = []
    async for event in (await node.prepare(request)).run():
        first = first or time.perf_counter()
        events.append(event)
    *tokens, done = events
    assert isinstance(done, GenerationResult)
    text = "".join(event.text for event in tokens if not isinstance(event, GenerationResult))
    rows = done.prompt_tokens - int(done.stats["cached_tokens"])
    return Given(text, first - began, rows, stands([[question.answer]], text))
