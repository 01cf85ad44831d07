"""A real vLLM behind a node: the same text, nearly its speed, drafts verified, one server killed. Prints a table.

scripts/vllm --vllm /path/to/venv/bin/vllm --model DIR: starts two servers there, with and without `--enable-scale-out`,
and ends them. --url: of one that runs, instead. On a busy machine speeds are also given in processor time a token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import typer

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import ServedModel
from paceline.engine.loader import load_model
from paceline.engine.remote.servers import RemoteModel, open_remote
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.link.connection import Link
from paceline.runtime.node import Node
from paceline.runtime.parts import Company, NodeParts
from paceline.runtime.service import GenerateRequest, TextDelta
from paceline.strategies.registry import STRATEGIES
from tests.requests import a_request, changed
from tests.runtime.link.test_connection import pipes
from tests.runtime.test_node import collect, open_gate
from tests.wire.identities import CLOUD, DEVICE, admit, cloud_end, device_end, known_as

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three fruits.",
    "Explain gravity in one sentence.",
    "Who wrote Hamlet?",
    "Name a prime number above 20.",
    "Translate 'good morning' into French.",
    "Tell me a joke.",
    "How do plants make food?",
    "What colour is the sky?",
    "Describe a cat.",
    "Write a Python function that adds two numbers.",
    "What is an atom?",
    "Give a synonym of happy.",
    "Why is the sea salty?",
    "What does HTTP stand for?",
    "Count from one to five.",
    "Who was Ada Lovelace?",
    "What is the largest planet?",
    "Name the four seasons.",
)
GREEDY = SamplingParams(temperature=0.0)
START_S = 600.0


@contextmanager
def served(vllm: Path, model: Path, port: int, *options: str) -> Iterator[str]:
    """A vLLM of this folder; its URL once it answers."""
    lines = Path(tempfile.gettempdir()) / f"vllm-{port}.log"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    iomp = next((vllm.parents[1] / "lib").glob("libiomp5.so"), None)
    if iomp is not None:
        settings |= {"LD_PRELOAD": str(iomp), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [str(vllm), "serve", str(model), "--served-model-name", "model", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", *options]
    with lines.open("w") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"vLLM does not start: see {lines}")
                try:
                    if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(1.0)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


async def asked_directly(
    client: httpx.AsyncClient, url: str, prompt: Sequence[int], count: int
) -> tuple[list[int], float]:
    """Tokens of a greedy stream of the server's own, and its seconds."""
    body = {"prompt": [*prompt], "max_tokens": count, "temperature": 0.0, "stream": True}
    found, begun = list[int](), time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in msgspec.json.decode(line[6:])["choices"]:
                    found += choice["token_ids"]
    return found, time.perf_counter() - begun


async def written(node: Node, request: GenerateRequest) -> tuple[str, int, float]:
    """(text, tokens, seconds) of a node's answer, streamed."""
    begun, text, tokens = time.perf_counter(), "", 0
    async for event in (await node.prepare(request)).run():
        if isinstance(event, TextDelta):
            text, tokens = text + event.text, tokens + event.tokens
    return text, tokens, time.perf_counter() - begun


def asked(question: str, count: int, params: SamplingParams = GREEDY) -> GenerateRequest:
    return a_request(({"role": "user", "content": question},), params, count)


async def equal_texts(node: Node, text: Tokenizer, url: str, count: int) -> str:
    same = 0
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:
        for question in QUESTIONS:
            request = asked(question, count)
            tokens, _ = await asked_directly(client, url, text.chat(request.prompt.messages), count)
            same += (
                text.decode([each for each in tokens if each not in text.eos_ids]) == (await written(node, request))[0]
            )
    return f"greedy texts equal to vLLM's own: {same} of {len(QUESTIONS)}"


async def speeds(node: Node, text: Tokenizer, url: str, clients: int, count: int) -> str:
    """Tokens a second in turns, so that both have the same machine; the ratio of the medians."""
    ratios = []
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:
        for _ in range(3):
            rates = []
            for far in (False, True):
                begun, own = time.perf_counter(), time.process_time()
                requests = [asked(QUESTIONS[each], count) for each in range(clients)]
                if far:
                    prompts = (text.chat(each.prompt.messages) for each in requests)
                    found = await asyncio.gather(*(asked_directly(client, url, each, count) for each in prompts))
                    number = sum(len(tokens) for tokens, _ in found)
                else:
                    number = sum(tokens for _, tokens, _ in await asyncio.gather(*(written(node, r) for r in requests)))
                rates.append((number / (time.perf_counter() - begun), 1e3 * (time.process_time() - own) / number))
            ratios.append(rates[0][0] / rates[1][0])
            typer.echo(
                f"  {clients} clients: {rates[0][0]:.1f} tokens/s ({rates[0][1]:.2f} ms of processor a token), "
                f"directly {rates[1][0]:.1f} ({rates[1][1]:.2f} ms)"
            )
    return f"streamed by {clients}: {sorted(ratios)[1]:.2f} of the server's own tokens/s"


async def together(far: ServedModel, model: Path, count: int, questions: int) -> str:
    """`draft_verify`, with a device of the same model, against the server's own texts."""
    near = load_model(model, dtype="float32", threads=1)
    plain = Node("cloud", far, None)
    cloud, device = Node("cloud", far, None), Node("device", near, None, NodeParts(company=Company(asks=open_gate())))
    fingerprint = far.tokenizer.fingerprint
    ours, theirs = known_as(DEVICE, fingerprint, STRATEGIES), known_as(CLOUD, fingerprint, STRATEGIES)
    left, right = pipes()
    size = far.tokenizer.vocab_size
    link = Link(left, device_end(ours), vocab_size=size, on_up=lambda up: device.on_link(up, "cloud"))
    other = Link(
        right, cloud_end(theirs), authenticate=admit, vocab_size=size, on_up=lambda up: cloud.on_link(up, "laptop")
    )
    same, accepted, drafted = 0, 0.0, 0.0
    async with plain, cloud, device, asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        tasks.create_task(other.run())
        await link.up.wait()
        await other.up.wait()
        for question in QUESTIONS[:questions]:
            request = changed(asked(question, count), strategy="draft_verify")
            text, done = await collect(await cloud.prepare(request))
            same += text == (await written(plain, asked(question, count)))[0]
            accepted += done.stats.get("accepted", 0.0)
            drafted += done.stats.get("drafted", done.stats.get("verified", 0.0))
        await link.close()
        await other.closed.wait()
    return f"draft_verify, greedy: {same} of {questions} equal; {accepted:g} of {drafted:g} drafts accepted"


async def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--vllm", type=Path)
    parse.add_argument("--url")
    parse.add_argument("--model", type=Path, required=True)
    parse.add_argument("--tokens", type=int, default=32)
    parse.add_argument("--only", default="texts,speeds,together")
    given = parse.parse_args()
    text = Tokenizer.load(given.model)
    with ExitStack() as opened:
        url = given.url or opened.enter_context(served(given.vllm, given.model, 8137, "--enable-scale-out"))
        found: RemoteModel = open_remote([url], given.model, text, name="model")
        typer.echo(str(found.abilities))
        if "together" in given.only:
            typer.echo(await together(ServedModel(found, text), given.model, given.tokens, 6))
        for generates in (True, False):
            far = open_remote([url], given.model, text, name="model")
            far.abilities = replace(far.abilities, generates=generates)
            typer.echo("/inference/v1/generate" if generates else "/v1/completions")
            async with Node("cloud", ServedModel(far, text), None) as node:
                if "texts" in given.only:
                    typer.echo(await equal_texts(node, text, url, given.tokens))
                for clients in (1, 8) if "speeds" in given.only else ():
                    typer.echo(await speeds(node, text, url, clients, given.tokens))


if __name__ == "__main__":
    asyncio.run(main())
