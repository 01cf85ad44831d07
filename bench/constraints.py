"""`paceline bench constraints`: constrained answers (JSON schema or tools), each validated, in every strategy.

Two nodes in this process, linked over a socket, with models of arbitrary distributions: answers validate only because
of the masks. With `--data` also the time of a mask over a real vocabulary of 151,646 tokens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import tokenizers
from jsonschema import Draft202012Validator, ValidationError
from tokenizers import decoders, models, pre_tokenizers

from lab.baselines.dragon import SHAPES
from lab.engines import Arbitrary
from paceline.core.aggregation.aggregators import AggregatorName
from paceline.core.sampling.sampler import Constraint, SamplingParams
from paceline.core.side import EVERYBODY, SIDES, Side
from paceline.engine.base import LoadedModel
from paceline.engine.fake import ByteTokenizer, FakeEngine
from paceline.engine.grammar.compiler import GrammarCompiler
from paceline.engine.tokenizer import SpecialTokens, Tokenizer
from paceline.runtime.asking import AskCounter, CloudAsks
from paceline.runtime.identity import PrivateKey, cloud_handshake, device_handshake
from paceline.runtime.link.connection import Link
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, NodeParts
from paceline.runtime.service import (
    AskedPrompt,
    GenerateRequest,
    GenerationResult,
    OutputForm,
    TextDelta,
)
from paceline.strategies.base import Strategy, Wish
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import Introduction

from .aggregation.two_process_rig import StreamTransport
from .report import Claim, Options, Report

NAME: Final = "constraints"
SUMMARY: Final = "answers held to a JSON schema or to tools that validate, in every strategy at 1, 8 and 32 at once"

RUNS: Final = 1000  # per strategy and concurrency
QUICK: Final = 40
CONCURRENCY: Final = (1, 8, 32)
MAX_TOKENS: Final = 200  # more than the longest of these answers

PERSON: Final[dict[str, object]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "born": {"anyOf": [{"type": "string", "pattern": "^[0-9]{4}$"}, {"type": "null"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: Final[dict[str, object]] = {
    "$defs": {"leaf": {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False}},
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
    "required": ["left"],
    "additionalProperties": False,
}
TOOLS: Final[dict[str, dict[str, object]]] = {"person": PERSON, "tree": TREE}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """A constraint on an answer, and its validation."""

    constraint: Constraint
    schema: dict[str, object] | None  # of the whole text; None: calls to `TOOLS`

    def holds(self, text: str) -> bool:
        try:
            if self.schema is not None:
                Draft202012Validator(self.schema).validate(json.loads(text))
                return True
            calls = [
                call.removesuffix("</tool_call>") for call in text.removeprefix("<tool_call>").split("\n<tool_call>")
            ]
            for call in map(json.loads, calls):
                Draft202012Validator(TOOLS[call["name"]]).validate(call["arguments"])
        except (ValueError, KeyError, TypeError, ValidationError):
            return False
        return bool(calls)


def _forms() -> tuple[AnswerForm, ...]:
    named = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]
    tools = json.dumps({"tools": named, "required": True, "parallel": False})
    schemas = (PERSON, TREE)
    return (
        *(AnswerForm(Constraint("json_schema", json.dumps(schema)), schema) for schema in schemas),
        AnswerForm(Constraint("tools", tools), None),
    )


FORMS: Final = _forms()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Totals of a run of answers."""

    runs: int
    valid: int
    tokens: int
    seconds: float


def run(options: Options) -> Report:
    count = QUICK if options.quick else RUNS
    rows = asyncio.run(_rows(count))
    if options.data is not None:
        rows += mask_rows(options.data / "tokenizers" / "qwen2")
    shares = [float(str(row["valid"])) / float(str(row["runs"])) for row in rows if "valid" in row]
    conditions = {"model": "fake, arbitrary distributions over 257 tokens", "clock": "real", "runs": count}
    return Report(NAME, conditions, rows, [Claim("constraints.valid", min(shares), 1.0, "higher")])


async def _rows(count: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    async with linked_nodes() as nodes:
        for strategy in STRATEGIES.values():
            for at_once in CONCURRENCY:
                outcome = await judged(nodes, strategy, count, at_once)
                rows.append(
                    {
                        "strategy": strategy.name,
                        "at_once": at_once,
                        "runs": outcome.runs,
                        "valid": outcome.valid,
                        "tokens": outcome.tokens,
                        "tokens_per_s": outcome.tokens / outcome.seconds,
                    }
                )
    return rows


# ---- answers --------------------------------------------------------------------------------------------------------
async def judged(nodes: dict[Side, Node], strategy: Strategy, count: int, at_once: int) -> Outcome:
    """Generate `count` answers, `at_once` at a time, over forms, sides, aggregators and draft modes; a fifth greedy."""
    numbers = iter(range(count))
    valid = tokens = 0
    start = time.perf_counter()

    async def write() -> None:
        nonlocal valid, tokens
        for number in numbers:
            form = FORMS[number % len(FORMS)]
            text, done = await _answer(nodes[SIDES[number % 2]], request(strategy, form, number))
            valid += done.reason == "stop" and done.strategy == strategy.name and form.holds(text)
            tokens += done.completion_tokens

    await asyncio.gather(*(write() for _ in range(at_once)))
    return Outcome(count, valid, tokens, time.perf_counter() - start)


def request(strategy: Strategy, form: AnswerForm, number: int) -> GenerateRequest:
    aggregators, shapes = get_args(AggregatorName), list(SHAPES.values())
    return GenerateRequest(
        AskedPrompt(({"role": "user", "content": f"Who is number {number}?"},)),
        Wish(
            strategy.name,
            SamplingParams(temperature=0.0 if number % 5 == 4 else 1.0, seed=number),
            options={
                "aggregator": aggregators[number // 6 % len(aggregators)] if strategy.text_of == "both" else "",
                "drafting": shapes[number // 18 % len(shapes)],
            },
        ),
        OutputForm(MAX_TOKENS, constraint=form.constraint),
    )


async def _answer(node: Node, request: GenerateRequest) -> tuple[str, GenerationResult]:
    text = ""
    session = await node.prepare(request)
    async for event in session.run():
        if isinstance(event, TextDelta):
            text += event.text
        elif isinstance(event, GenerationResult):
            return text, event
    raise AssertionError("an answer without an end")


@asynccontextmanager
async def linked_nodes() -> AsyncIterator[dict[Side, Node]]:
    """Both sides in this process, each with its own model and no documents."""
    seeds: dict[Side, int] = {"device": 1, "cloud": 2}
    loaded = {side: LoadedModel(Arbitrary(FakeEngine(seed)), ByteTokenizer()) for side, seed in seeds.items()}
    asks = CloudAsks(EVERYBODY, AskCounter(sys.maxsize, sys.maxsize))  # no question is one too many
    nodes = {
        side: Node(side, model, None, NodeParts(company=Company(asks=asks if side == "device" else None)))
        for side, model in loaded.items()
    }
    identity = {
        side: Introduction(model.tokenizer.fingerprint, model.engine.info.fingerprint, side, list(STRATEGIES), 0, None)
        for side, model in loaded.items()
    }

    keys: dict[Side, PrivateKey] = {side: PrivateKey.generate() for side in SIDES}

    async def admit(_: object) -> bytes:
        return keys["device"].public_key

    left, right = socket.socketpair()
    async with nodes["device"], nodes["cloud"], asyncio.TaskGroup() as tasks:
        device = Link(
            StreamTransport(*await asyncio.open_connection(sock=left)),
            device_handshake(
                identity["device"], device="device", keys=[keys["device"]], server_key=keys["cloud"].public_key
            ),
            on_up=lambda link: nodes["device"].on_link(link, "cloud"),
        )
        cloud = Link(
            StreamTransport(*await asyncio.open_connection(sock=right)),
            cloud_handshake(identity["cloud"], keys["cloud"]),
            authenticate=admit,
            on_up=lambda link: nodes["cloud"].on_link(link, "device"),
        )
        for link in (device, cloud):
            tasks.create_task(link.run())
        await device.up.wait()
        await cloud.up.wait()
        try:
            yield nodes
        finally:
            await device.close()
            await cloud.closed.wait()


# ---- the time of a mask ---------------------------------------------------------------------------------------------
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def qwen_tokenizer(folder: Path) -> Tokenizer:
    """Tokenizer with Qwen2's vocabulary and merges."""
    reader = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    reader.add_special_tokens(list(SPECIAL))
    eos_ids = frozenset(token for name in (SPECIAL[0], SPECIAL[2]) if (token := reader.token_to_id(name)) is not None)
    return Tokenizer(reader.to_str().encode(), None, SpecialTokens(ends=eos_ids))


PLACE: Final[dict[str, object]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "year": {"type": "integer", "minimum": 0, "maximum": 3000},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "kind": {"enum": ["town", "village", "island"]},
        "at": {"type": "object", "properties": {"x": {"type": "number"}, "day": {"type": "string", "format": "date"}}},
    },
    "required": ["name", "year", "tags", "kind", "at"],
    "additionalProperties": False,
}
EXAMPLE: Final = (
    '{"name": "Tarnwick on the \\"old\\" quay, näher als 東京", "year": 1873, "tags": ["harbour", "lamps", "rain at '
    'night"], "kind": "village", "at": {"x": -12.75, "day": "2024-02-29"}}'
)
WORDS: Final = "The ferry leaves at noon; I shall look up when it comes back. "


def mask_rows(folder: Path) -> list[dict[str, object]]:
    """Time of one mask per token of an answer; then again with a draft of three other tokens masked before each."""
    tokenizer = qwen_tokenizer(folder)
    grammars = GrammarCompiler(tokenizer)
    rows: list[dict[str, object]] = [{"mask": "reading the vocabulary, ms", "median": _ms(grammars.warm)}]
    call = f'{WORDS * 3}<tool_call>\n{{"name": "place", "arguments": {EXAMPLE}}}\n</tool_call>'
    tools = {"tools": [{"name": "place", "parameters": PLACE}], "required": False, "parallel": True}
    for name, constraint, text in (
        ("schema", Constraint("json_schema", json.dumps(PLACE)), EXAMPLE),
        ("any object", Constraint("json_object"), EXAMPLE),
        ("text and calls", Constraint("tools", json.dumps(tools)), call),
    ):
        rows.append({"mask": f"{name}: compiling, ms", "median": _ms(lambda: grammars.mask(constraint))})  # noqa: B023
        path = tokenizer.encode(text)
        for drafts in (0, 3):
            mask = grammars.mask(constraint)
            times_us = []
            for at in range(len(path)):
                for draft in range(drafts):
                    mask.allowed([*path[: max(at - 2, 0)], *path[: draft + 1]])
                start = time.perf_counter()
                mask.allowed(path[:at])
                times_us.append(1e6 * (time.perf_counter() - start))
            rows.append({"mask": f"{name}: a mask, {drafts} drafts between, us"} | _spread(times_us))
    return rows


def _ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def _spread(values: Sequence[float]) -> dict[str, object]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "p95": ordered[int(0.95 * len(ordered))], "max": ordered[-1]}
