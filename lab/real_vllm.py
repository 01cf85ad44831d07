"""A real vLLM behind a node: the same text, nearly its speed, drafts verified, coins tossed, servers and sides killed.

scripts/vllm --vllm /path/to/venv/bin/vllm --model DIR --gguf FILE: starts the servers that each part of `--only` needs,
one thread each, and ends them; the file is of the same vocabulary, for a device on llama.cpp. --url: of one that runs,
instead; no server is killed then. Each part prints a line, with how many prompts it is of. On a busy machine speeds are
also given in processor time a token.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec
import typer

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import ServedModel
from paceline.engine.loader import load_model
from paceline.engine.remote.opening import open_remote
from paceline.engine.remote.servers import RemoteModel
from paceline.engine.tokenizer import Tokenizer
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, GenerationResult, TextDelta
from paceline.runtime.sessions.client import ClientSession
from paceline.strategies.base import SIDES, Side
from tests.core.chi_square import sigmas
from tests.e2e.pair import QUESTION, Pair, running_pair
from tests.requests import a_request, changed
from tests.runtime.test_node import collect, linked

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
STYLES = ("", "Answer briefly. ", "Explain it to a child. ", "In one sentence: ", "Please. ")
PROMPTS = tuple(f"{style}{question}" for style in STYLES for question in QUESTIONS)
GREEDY = SamplingParams(temperature=0.0)
START_S = 1200.0
WAIT_S = 3600.0  # for an answer of a busy machine
BLOCKS = ("--block-size", "32")  # on a CPU else 128: no prompt here would be cached
T = TypeVar("T")
AT_ONCE = 8  # requests, as many as the servers take
LEAST_EXPECTED = 8.0  # of an outcome of a chi-squared test


class VLLM(NamedTuple):
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """With all of its processes, as in a power cut."""
        os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def served(vllm: Path, model: Path, port: int, *options: str) -> Iterator[VLLM]:
    """A vLLM of this folder, once it answers."""
    lines = Path(tempfile.gettempdir()) / f"vllm-{port}.log"
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"OMP_NUM_THREADS": "1", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600"}  # of a busy machine
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
            yield VLLM(url, process)
        finally:
            with suppress(ProcessLookupError):
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


async def at_once(work: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Results of all, `AT_ONCE` at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def placed(each: Coroutine[object, object, T]) -> T:
        async with places:
            return await each

    return list(await asyncio.gather(*map(placed, work)))


async def own_texts(text: Tokenizer, url: str, prompts: Sequence[str], count: int) -> list[str]:
    """Greedy texts of a server, asked directly."""
    async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as client:

        async def own(prompt: str) -> str:
            tokens, _ = await asked_directly(client, url, text.chat(asked(prompt, count).prompt.messages), count)
            return text.decode([each for each in tokens if each not in text.eos_ids])

        return await at_once([own(prompt) for prompt in prompts])


async def equal_texts(node: Node, text: Tokenizer, url: str, count: int) -> str:
    own = await own_texts(text, url, QUESTIONS, count)
    ours = await at_once([written(node, asked(question, count)) for question in QUESTIONS])
    same = sum(one == other for one, (other, _, _) in zip(own, ours, strict=True))
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


async def drafted(cloud: Node, text: Tokenizer, url: str, prompts: Sequence[str], count: int) -> str:
    """`draft_verify` against the server's own texts."""
    own = await own_texts(text, url, prompts, count)
    found: list[tuple[bool, GenerationResult]] = []

    async def answered(prompt: str, theirs: str) -> None:
        ours, done = await collect(await cloud.prepare(changed(asked(prompt, count), strategy="draft_verify")))
        found.append((ours == theirs, done))
        if ours != theirs:
            typer.echo(f"  {prompt!r}: {theirs!r} by vLLM, {ours!r} here ({done.strategy_reason})")
        if len(found) % AT_ONCE == 0:
            typer.echo(f"  {sum(same for same, _ in found)} of {len(found)}")

    await at_once([answered(prompt, theirs) for prompt, theirs in zip(prompts, own, strict=True)])
    lost = sum(done.strategy != "draft_verify" or done.degraded is not None for _, done in found)
    kept, drafts = (sum(done.stats.get(name, 0.0) for _, done in found) for name in ("accepted", "drafted"))
    return (
        f"draft_verify, greedy: {sum(same for same, _ in found)} of {len(found)} equal to vLLM's own; "
        f"{kept:g} of {drafts:g} drafts accepted{f'; {lost} NOT JOINT' if lost else ''}"
    )


async def sampled(cloud: Node, far: RemoteModel, text: Tokenizer, strategy: str, count: int) -> str:
    """Chi-squared tests of the first token of `count` seeds, and of the two first together, against the server's own
    log-probabilities. A device of the same model: both sides' target is that of the server alone."""
    prompt = text.chat(asked(QUESTIONS[7], 1).prompt.messages)
    (first,) = await far.rows([prompt], 20, "trial")
    likely = [token for token, value in first.logprobs.items() if math.exp(value) * count >= LEAST_EXPECTED]
    seconds = await far.rows([[*prompt, token] for token in likely], 20, "trial")
    one: dict[tuple[int, ...], float] = {(token,): math.exp(first.logprobs[token]) for token in likely}
    two: dict[tuple[int, ...], float] = {
        (token, then): math.exp(first.logprobs[token] + value)
        for token, row in zip(likely, seconds, strict=True)
        for then, value in row.logprobs.items()
    }

    doubtful = 0

    async def begun(seed: int) -> tuple[int, ...]:
        nonlocal doubtful
        params = SamplingParams(seed=seed)
        request = changed(asked(QUESTIONS[7], 2, params), strategy=strategy, top_logprobs=None)
        session = await cloud.prepare(request)
        assert isinstance(session, ClientSession)
        _, done = await collect(session)
        assert done.strategy == strategy and done.degraded is None, done.strategy_reason
        doubtful += "approximate" in done.strategy_reason
        if seed % (4 * AT_ONCE) == 0:
            typer.echo(f"  {strategy}: {seed} of {count}")
        return tuple(session.written.tokens)

    found = await at_once([begun(seed) for seed in range(count)])
    tests = ", ".join(f"{_distance(found, probs):.1f}" for probs in (one, two))
    return (
        f"{strategy}, sampled, {count} seeds: first token and two tokens {tests} sigma from vLLM's (4 are too many); "
        f"{doubtful} told as approximate"
    )


def _distance(found: Sequence[tuple[int, ...]], probs: Mapping[tuple[int, ...], float]) -> float:
    """See `sigmas`. What `probs` does not name is one outcome."""
    counts = Counter(each[: len(next(iter(probs)))] for each in found)
    observed, expected = [counts[each] for each in probs], [*probs.values()]
    return sigmas([*observed, len(found) - sum(observed)], [*expected, max(0.0, 1.0 - sum(expected))])


async def killed(servers: Sequence[VLLM], model: Path, text: Tokenizer, count: int) -> str:
    """One of two servers, in the middle of a greedy answer, with SIGKILL."""
    (own,) = await own_texts(text, servers[0].url, QUESTIONS[9:10], count)
    far = open_remote([each.url for each in servers], model, text, name="model")
    orders, order = list[list[Any]](), far._order

    def noted(salt: str) -> list[Any]:
        orders.append(order(salt))
        return orders[-1]

    far._order = noted  # type: ignore[method-assign]
    async with Node("cloud", ServedModel(far, text), None) as node:
        found, dead = "", False
        async for event in (await node.prepare(asked(QUESTIONS[9], count))).run():
            if isinstance(event, TextDelta):
                found += event.text
                if not dead:
                    dead = True
                    next(each for each in servers if each.url == orders[0][0].url).kill()
    return (
        f"a server killed after the first token: the text {'goes on' if found == own else 'DIFFERS'} ({count} tokens)"
    )


def both_sides(url: str, model: Path, gguf: Path, count: int) -> Iterator[str]:
    """A cloud on this server and a device on llama.cpp, as processes, with documents on both; each killed in turn."""
    asked_for = {
        "model": "joint",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": count,
        "temperature": 0.0,
        "stream": True,
        "paceline": {"strategy": "aggregate", "documents": 1, "report": True},
    }

    def answer(pair: Pair, side: Side, kill: Callable[[], None] = lambda: None) -> str:
        """What a client at this side gets, as a sentence's end. kill: at the first text."""
        text, pieces, report = "", 0, dict[str, Any]()
        url = f"{pair.url(side)}/v1/chat/completions"
        with httpx.stream("POST", url, json=asked_for, timeout=WAIT_S, trust_env=False) as answer:
            if answer.is_error:
                return f"refused: {answer.read().decode()}"
            for line in answer.iter_lines():
                chunk = msgspec.json.decode(line[6:]) if line.startswith("data: {") else {}
                if "error" in chunk:
                    return f"the stream ends with the error {chunk['error']} after {text!r}"
                for choice in chunk.get("choices", ()):
                    if not (content := choice["delta"].get("content")):
                        continue
                    text, pieces = text + content, pieces + 1
                    kill()
                    kill = lambda: None  # noqa: E731  # once
                report = chunk.get("paceline") or report
        told = {name: report.get(name) for name in ("strategy", "degraded", "why") if report.get(name)}
        return f"{pieces} pieces, {text!r}, {told}"

    def kill_cloud() -> None:
        os.kill(pair.started.cloud.process.pid, signal.SIGKILL)

    with TemporaryDirectory() as folder:
        models: Mapping[Side, str] = {"cloud": str(model), "device": str(gguf)}
        started = running_pair(Path(folder), model=models, flags=("--name", "joint"), cloud_flags=("--engine-url", url))
        with started as pair:
            for side in SIDES:
                yield f"aggregate, in front the {side}: {answer(pair, side)}"
            yield f"the device killed in mid-answer, at the cloud: {answer(pair, 'cloud', pair.kill_agent)}"
            pair.restart_agent()
            yield f"the cloud killed in mid-answer, at the device: {answer(pair, 'device', kill_cloud)}"


async def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--vllm", type=Path)
    parse.add_argument("--url")
    parse.add_argument("--model", type=Path, required=True)
    parse.add_argument("--gguf", type=Path)
    parse.add_argument("--tokens", type=int, default=16)
    parse.add_argument("--prompts", type=int, default=len(PROMPTS))
    parse.add_argument("--seeds", type=int, default=200)
    parse.add_argument("--only", default="texts,speeds,drafts,sampled,coin,killed,sides")
    given = parse.parse_args()
    parts, text = given.only.split(","), Tokenizer.load(given.model)
    with ExitStack() as opened:
        started = [] if given.url else [opened.enter_context(served(given.vllm, given.model, 8137, *BLOCKS))]
        url = given.url or started[0].url
        found: RemoteModel = open_remote([url], given.model, text, name="model")
        typer.echo(str(found.abilities))
        if {"drafts", "sampled", "coin"} & {*parts}:
            near = load_model(given.model, dtype="float32", threads=1)
            async with linked(ServedModel(found, text), near, within_s=None) as bench:
                if "drafts" in parts:
                    typer.echo(await drafted(bench.cloud, text, url, PROMPTS[: given.prompts], given.tokens))
                for part, strategy in (("sampled", "draft_verify"), ("coin", "aggregate")):
                    if part in parts:
                        typer.echo(await sampled(bench.cloud, found, text, strategy, given.seeds))
        if {"texts", "speeds"} & {*parts}:
            far = open_remote([url], given.model, text, name="model")
            async with Node("cloud", ServedModel(far, text), None) as node:
                if "texts" in parts:
                    typer.echo(await equal_texts(node, text, url, given.tokens))
                for clients in (1, 8) if "speeds" in parts else ():
                    typer.echo(await speeds(node, text, url, clients, given.tokens))
        if "sides" in parts and given.gguf:
            for line in both_sides(url, given.model, given.gguf, 3 * given.tokens):
                typer.echo(line)
        if "killed" in parts and given.vllm:
            started.append(opened.enter_context(served(given.vllm, given.model, 8138, *BLOCKS)))
            if len(started) < 2:  # of --url is none killed
                started.append(opened.enter_context(served(given.vllm, given.model, 8139, *BLOCKS)))
            typer.echo(await killed(started, given.model, text, 3 * given.tokens))


if __name__ == "__main__":
    asyncio.run(main())
