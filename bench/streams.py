"""`paceline bench streams`: tokens per second of one client and of sixteen concurrent ones, over HTTP, on one server.

A real server process with the demo's cloud model and no documents; clients stream with the official client's wire
format. Rounds of one and of sixteen alternate; the figure is the ratio of the medians. The end token is banned, so that
every answer has the same length.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from paceline.commands.demo import Children, command, free_port
from paceline.engine.tokenizer import Tokenizer
from paceline.models import CAUSAL, CLOUD

from .report import Claim, Options, Report

NAME = "streams"
SUMMARY = "tokens/s of 16 concurrent streams against one stream, over HTTP, on the demo cloud model"

STREAMS = 16
TOKENS = 96  # per answer


def run(options: Options) -> Report:
    rounds = 2 if options.quick else 6
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory, Children(Path(directory)) as children:
        port = free_port(0)
        state = str(Path(directory) / "state")
        flags = ("--embedder", "hash", "--port", str(port), "--state-dir", state)
        serve = command("serve", "--model", CAUSAL, *flags)
        server = children.start("cloud", serve, port=port)
        children.wait(lambda ready: all(ready))
        rows = asyncio.run(_measure(server.url, rounds))
    rates = {
        streams: statistics.median(row["tokens_per_s"] for row in rows if row["streams"] == streams)
        for streams in (1, STREAMS)
    }
    claim = Claim("streams.x16_vs_x1", rates[STREAMS] / rates[1], 4.0, "higher")
    conditions = {"model": "demo cloud", "tokens": TOKENS, "rounds": rounds, "clients": "httpx, one process, loopback"}
    return Report(NAME, conditions, rows, (claim,))


async def _measure(url: str, rounds: int) -> list[dict[str, float]]:
    """A row per round; the first round of each size is a warm-up and left out."""
    bias = {str(token): -100 for token in Tokenizer.load(CLOUD).eos_ids}
    rows: list[dict[str, float]] = []
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits, trust_env=False) as client:
        for round_index in range(rounds + 1):
            for streams in (1, STREAMS):
                start = time.perf_counter()
                tokens = await asyncio.gather(
                    *(_answer(client, bias, round_index * STREAMS + i) for i in range(streams))
                )
                seconds = time.perf_counter() - start
                if round_index:
                    rows.append(
                        {"streams": streams, "tokens": sum(tokens), "s": seconds, "tokens_per_s": sum(tokens) / seconds}
                    )
    return rows


async def _answer(client: httpx.AsyncClient, bias: dict[str, int], seed: int) -> int:
    """One streamed answer: its number of tokens, from `usage`."""
    body = {
        "model": CAUSAL,
        "messages": [{"role": "user", "content": "What do you know about the harbour?"}],
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "logit_bias": bias,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and '"usage":{' in line:
                tokens = int(json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"])
    return tokens
