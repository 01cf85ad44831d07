"""`paceline bench surface`: CPU time of the HTTP surface per streamed token at 64 clients, and open streams.

A real server process with the fake model, whose forward is a table look-up, so the measured work is the server's own:
HTTP, JSON, sessions, sampling, scheduling. Measured with plain decoding and with `auto`, which tries drafts until it
finds that they save nothing here; the claim is on the more expensive of the two. The clients are raw sockets in this
process, whose CPU time is not counted. CPU time is the server process's, user and system, over whole rounds after a
warm-up round; tokens are those of `usage`. Then clients disconnect during their answers, and the time until the server
has stopped writing them is measured. Then 1,000 streams are opened, and each must deliver text while all are open.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import resource
import statistics
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from paceline.commands.demo import Children, command, configured, free_port
from paceline.engine.fake import EOS

from .report import Claim, Options, Report

NAME = "surface"
SUMMARY = "CPU of the server per streamed token at 64 clients, and 1,000 open streams, with the fake model"

CLIENTS = 64
TOKENS = 256  # per answer
WAYS = ("autoregressive", "auto")
OPEN = 1_000
OPEN_TOKENS = 4_000  # of an answer that is only held open: its client disconnects long before its end
TIMEOUT = 300.0  # s for all streams to open and to deliver

_USAGE = re.compile(rb'"completion_tokens":(\d+)')


def run(options: Options) -> Report:
    rounds = 2 if options.quick else 5
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4 * OPEN), hard), hard))  # one socket a stream
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory, Children(Path(directory)) as children:
        port = free_port(0)
        state, threads = str(Path(directory) / "state"), configured(Path(directory), "tuning.threads = 1")
        serve = command("serve", "--model", "fake", "--port", str(port), "--state-dir", state, *threads)
        server = children.start("cloud", serve, port=port)
        children.wait(lambda ready: all(ready))
        process = psutil.Process(server.process.pid)
        rows = asyncio.run(_measure(server.url, process, rounds))
        freed = asyncio.run(_leave(server.url, 4 if options.quick else 20))
        rows += [{"left": way, "slot_freed_ms": ms} for way, ms in freed]
        held = asyncio.run(_hold(server.url))
        rows.append({"open_streams": OPEN, "delivered": held, "rss_mib": process.memory_info().rss / 2**20})
    cost = max(
        statistics.median(float(str(row["cpu_ms_per_token"])) for row in rows if row.get("strategy") == way)
        for way in WAYS
    )
    claims = (
        Claim("surface.cpu_ms_per_token_64", cost, 0.5, "lower"),
        Claim("surface.slot_freed_ms", max(ms for _, ms in freed), 500.0, "lower"),
        Claim("surface.open_streams", float(held), float(OPEN), "higher"),
    )
    conditions = {"model": "fake", "clients": CLIENTS, "tokens": TOKENS, "rounds": rounds, "sockets": "loopback"}
    return Report(NAME, conditions, rows, claims)


# ---- CPU time per token ---------------------------------------------------------------------------------------------
async def _measure(url: str, process: psutil.Process, rounds: int) -> list[dict[str, object]]:
    """A row per round and strategy; the first round is a warm-up and left out."""
    rows: list[dict[str, object]] = []
    for round_index, strategy in itertools.product(range(rounds + 1), WAYS):
        before, start = _cpu(process), asyncio.get_running_loop().time()
        tokens = sum(await asyncio.gather(*(_answer(url, round_index * CLIENTS + i, strategy) for i in range(CLIENTS))))
        seconds, cpu = asyncio.get_running_loop().time() - start, _cpu(process) - before
        if round_index:
            rows.append(
                {
                    "strategy": strategy,
                    "clients": CLIENTS,
                    "tokens": tokens,
                    "cpu_s": cpu,
                    "cpu_ms_per_token": 1000 * cpu / tokens,
                    "tokens_per_s": tokens / seconds,
                }
            )
    return rows


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _answer(url: str, seed: int, strategy: str = "auto") -> int:
    """One streamed answer, read to its end: its number of completion tokens."""
    reader, writer = await _open(url, seed, TOKENS, strategy)
    try:
        body = await reader.read()
    finally:
        writer.close()
    if not body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        raise RuntimeError(f"a stream ended early: {body[-200:]!r}")
    return int(_USAGE.findall(body)[-1])


async def _open(
    url: str, seed: int, tokens: int, strategy: str = "auto", *, stream: bool = True
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Request an answer on a new connection."""
    body = json.dumps(
        {
            "model": "fake",
            "messages": [{"role": "user", "content": "What do you know about the harbour?"}],
            "max_tokens": tokens,
            "seed": seed,
            "logit_bias": {str(EOS): -100},
            "paceline": {"strategy": strategy},
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
    ).encode()
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
    return reader, writer


# ---- clients that disconnect -----------------------------------------------------------------------------------------
async def _leave(url: str, times: int) -> list[tuple[str, float]]:
    """(streamed or whole, ms from the client's disconnect until the server has no answer in progress)"""
    times_ms = []
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for turn, stream in itertools.product(range(times), (True, False)):
            _, writer = await _open(url, turn, OPEN_TOKENS, stream=stream)
            await _until(client, 1)
            start = time.perf_counter()
            writer.transport.abort()
            await _until(client, 0)
            times_ms.append(("stream" if stream else "whole answer", 1000 * (time.perf_counter() - start)))
    return times_ms


async def _until(client: httpx.AsyncClient, answers: int) -> None:
    """Poll until the server has this number of answers; a poll takes a few ms."""
    async with asyncio.timeout(TIMEOUT):
        while (await client.get("/readyz")).json()["answers"] != answers:
            pass


# ---- streams held open ----------------------------------------------------------------------------------------------
async def _hold(url: str) -> int:
    """Number of streams that delivered text while all were open."""
    streams = []
    try:
        async with asyncio.timeout(TIMEOUT):
            for seed in range(OPEN):
                streams.append(await _open(url, seed, OPEN_TOKENS))
            first = await asyncio.gather(*(_delivers(reader) for reader, _ in streams))
            second = await asyncio.gather(*(_delivers(reader) for reader, _ in streams))
    finally:
        for _, writer in streams:
            writer.transport.abort()
    return sum(both for both in map(all, zip(first, second, strict=True)))


async def _delivers(reader: asyncio.StreamReader) -> bool:
    """True once a text delta arrives, not only the head of the response."""
    while line := await reader.readline():
        if b'"content":"' in line and b'"content":""' not in line:
            return True
    return False
