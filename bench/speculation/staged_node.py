"""A node on a pipeline of paced stages, each a process of its own, with the device's demo model as draft model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import psutil

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, LoadedModel, delay_forwards
from paceline.engine.loader import fingerprint, load_model
from paceline.engine.model_config import sampling_defaults
from paceline.engine.stage import num_layers
from paceline.engine.tokenizer import Tokenizer
from paceline.models import CLOUD, DEVICE
from paceline.runtime.identity import PrivateKey
from paceline.runtime.node import Node
from paceline.runtime.resources import Computing, NodeParts
from paceline.runtime.service import (
    Account,
    AskedPrompt,
    GenerateRequest,
    GenerationResult,
    OutputForm,
    TextDelta,
)
from paceline.runtime.stages.members import READY, Members, Place, StageCredential
from paceline.runtime.stages.pipeline import RemotePipeline
from paceline.strategies.base import Strategy, Wish
from paceline.strategies.registry import STRATEGIES, register
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a pipeline's parts, s."""

    stages: int = 4
    forward_s: float = 0.1  # of a stage, for one row
    row_s: float = 0.0003
    hop_s: float = 0.002  # one way
    draft_s: float = 0.01  # of a draft model's forward


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, with its times on the loop's clock."""

    text: str
    tokens: int
    first: float  # s, the first piece of text
    last: float
    tokens_first: int  # in that piece
    stats: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        """After the first piece."""
        return (self.tokens - self.tokens_first) / (self.last - self.first)


@dataclass(slots=True)
class StagedNode:
    node: Node
    processes: list[subprocess.Popen[str]]
    answers: int = 0  # so far

    def resident_mib(self) -> list[int]:
        """Resident memory of each stage's process."""
        return [psutil.Process(each.pid).memory_info().rss >> 20 for each in self.processes]

    async def answer(
        self, prompt: Sequence[int], sampling: SamplingParams, tokens: int, strategy: Strategy
    ) -> Answered:
        """Look-up tables know nothing of the answers before."""
        self.answers += 1
        if strategy.name not in STRATEGIES:
            register(strategy)
        request = GenerateRequest(
            AskedPrompt(tokens=tuple(prompt)),
            Wish(strategy.name, sampling, options={"rescoring": False}, documents=0),
            OutputForm(tokens),
            account=Account(owner=f"answer {self.answers}"),
        )
        loop = asyncio.get_running_loop()
        session = await self.node.prepare(request)
        text, first, last, tokens_first = "", 0.0, 0.0, 0
        found: GenerationResult | None = None
        async for event in session.run():
            last = loop.time()
            if isinstance(event, TextDelta):
                if not text:
                    first, tokens_first = last, event.tokens
                text += event.text
            else:
                found = event
        assert found is not None and found.reason == "length", found
        return Answered(text, found.completion_tokens, first, last, tokens_first, dict(found.stats))


@asynccontextmanager
async def staged_node(pace: Pace, model: Path = CLOUD, draft_model: Path = DEVICE) -> AsyncIterator[StagedNode]:
    """A model in stages with as many layers each; by default the cloud's demo model, and the device's for drafts."""
    layers = num_layers(model)
    cuts = [layers * number // pace.stages for number in range(pace.stages + 1)]
    head, keys = PrivateKey.generate(), [PrivateKey.generate() for _ in range(pace.stages)]
    with _processes(pace, model, cuts, keys, head.public_key) as (processes, addresses):
        by_name = {f"stage {number}": key for number, key in enumerate(keys)}

        async def admit(claim: Claim) -> bytes | CloseCode:
            key = by_name[claim.device].public_key
            return key if claim.proves(key) else CloseCode.BAD_CREDENTIAL

        make = partial(
            Members,
            list(map(Place, addresses)),
            key=head,
            admit=admit,
            fingerprint=fingerprint(model),
            format=None,
        )
        pipeline = await asyncio.to_thread(RemotePipeline, make, "demo", sampling_defaults(model))
        try:
            drafts = delay_forwards(load_model(draft_model, threads=1, kv_mib=64).engine, pace.draft_s)
            loaded = LoadedModel(cast(Engine, pipeline), Tokenizer.load(model))
            async with Node("cloud", loaded, None, NodeParts(computing=Computing(draft_engine=drafts))) as node:
                yield StagedNode(node, processes)
        finally:
            await asyncio.to_thread(pipeline.close)


@contextmanager
def _processes(
    pace: Pace, model: Path, cuts: Sequence[int], keys: Sequence[PrivateKey], head_key: bytes
) -> Iterator[tuple[list[subprocess.Popen[str]], list[str]]]:
    """The stages' processes and addresses."""
    times = ("--forward-s", pace.forward_s, "--row-s", pace.row_s, "--hop-s", pace.hop_s)
    processes: list[subprocess.Popen[str]] = []
    root = Path(__file__).parents[2]
    try:
        for number, key in enumerate(keys):
            layers = f"{cuts[number]}:{cuts[number + 1]}"
            command = (sys.executable, "-m", "bench.speculation.paced_stage", "--model", model, "--layers", layers)
            process = subprocess.Popen(
                [*map(str, (*command, *times))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=root,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            processes.append(process)
            assert process.stdin is not None
            credential = StageCredential(f"stage {number}", key.seed, head_key)
            process.stdin.write(f"{msgspec.json.encode(credential).decode()}\n")
            process.stdin.flush()
        yield processes, [_address(each) for each in processes]
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise RuntimeError("a stage's process has ended; its output says why")
