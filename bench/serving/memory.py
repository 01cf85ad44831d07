"""Resident memory of a server that has answered, above a process with the same imports, over the bytes of the weights.

Read from `/proc/PID/status`, so on Linux only, and of the host's memory alone. The KV cache is kept small, since its
size is a setting; it counts, as do the tokenizer and all buffers.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final

from paceline.commands.demo import Children

from ..findings import Findings
from ..report import Claim
from .clients import Question, ask, connect, user
from .model_files import ModelFiles
from .systems import Paceline, start

NAME: Final = "engine.memory_vs_weights"
KV_MIB: Final = 64
REQUESTS: Final = 20
FIELDS: Final = ("VmRSS", "RssAnon", "RssFile", "VmHWM")

# What a server has imported when it serves a Qwen2 model with embedder `hash`.
IMPORTS: Final = (
    "paceline.server.program",
    "paceline.client.conversation",
    "paceline.commands.main",
    "paceline.engine.loader",
    "paceline.engine.hf",
    "paceline.engine.paged.engine",
    "paceline.engine.tokenizer",
    "transformers.models.qwen2.modeling_qwen2",
    "uvicorn.main",
)
IDLE: Final = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("ready", flush=True)
sys.stdin.read()
"""


def measure(children: Children, model: ModelFiles) -> Findings:
    """Start a server, and leave it running until `children` ends."""
    idle = _idle()
    system = Paceline(kv_mib=KV_MIB)
    child = start(children, system, model)
    loaded = _memory(child.process.pid)
    asyncio.run(_requests(child.url, system, model))
    served = _memory(child.process.pid)
    rows = [_row("imports alone", idle), _row("model loaded", loaded), _row(f"{REQUESTS} requests served", served)]
    weights = model.weight_bytes / 2**20
    for row, memory in zip(rows, (idle, loaded, served), strict=True):
        row["vs_weights"] = (memory["VmRSS"] - idle["VmRSS"]) / weights
    found = Findings(rows)
    found.claim(Claim(NAME, (served["VmRSS"] - idle["VmRSS"]) / weights, 1.25, "lower"))
    return found


def _idle() -> dict[str, float]:
    """Memory of a process that has imported what a server imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", IDLE, *IMPORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("the idle process could not import the server's modules")
        return _memory(process.pid)


async def _requests(url: str, system: Paceline, model: ModelFiles) -> None:
    """Short requests, one after another: sampled and greedy in turn."""
    async with connect(url, 1) as client:
        for number in range(REQUESTS):
            extra = system.dialect(model, temperature=0.8 * (number % 2), top_p=0.95, seed=number)
            await ask(client, Question((user(model.text(number, 16)),), 8, extra))


def _memory(pid: int) -> dict[str, float]:
    """MiB by field."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) / 1024 for line in lines if line and line[0].rstrip(":") in FIELDS}


def _row(way: str, memory: dict[str, float]) -> dict[str, object]:
    names = {"VmRSS": "rss_mib", "RssAnon": "anonymous_mib", "RssFile": "file_mib", "VmHWM": "peak_mib"}
    return {"part": "memory", "way": way} | {names[field]: memory[field] for field in FIELDS}
