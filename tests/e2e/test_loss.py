"""`kill -9` in mid-answer: the stream completes, no text is lost or repeated, and the last event is marked degraded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.commands.local_pair import store_of
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake.engine import fake_model
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.sessions.prompts import PromptSet, build_prompts
from tests.e2e.pair import QUESTION, Pair, running_pair
from tests.strategies import oracle

MAX_TOKENS = 60
SEED = 4
KILLS = 10


async def prompts_of_the_cloud(directory: Path) -> PromptSet:
    """The server's branches for the question."""
    model = fake_model(0)
    messages = [{"role": "user", "content": QUESTION}]
    with DocumentStore.open(store_of(directory, "cloud"), load_embedder("hash")) as store:
        return await build_prompts(messages, store, model.tokenizer, k=2, max_prompt=2048)


def ask(pair: Pair, drafts: str) -> tuple[str, str | None, str | None]:
    """(text, finish reason, degraded) of one streamed answer."""
    text, reason, degraded = "", None, None
    stream = pair.client("cloud").chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        temperature=1.0,
        seed=SEED,
        stream=True,
        extra_body={"paceline": {"device": "laptop", "report": True, "drafts": drafts}},
    )
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
        extra = (chunk.model_extra or {}).get("paceline") or {}
        degraded = extra.get("degraded", degraded)
    return text, reason, degraded


def ask_and_kill(pair: Pair, drafts: str, messages: int) -> tuple[str, str | None, str | None]:
    """The same, with the agent killed as soon as it sends one more than `messages` messages."""
    turnstile = pair.turnstile
    assert turnstile is not None
    turnstile.let(messages)
    ended = threading.Event()

    def kill() -> None:
        while not (turnstile.held.wait(0.02) or ended.is_set()):
            pass  # an answer may need fewer messages
        pair.kill_agent()
        turnstile.cut()

    with ThreadPoolExecutor(1) as beside:
        killing = beside.submit(kill)
        try:
            return ask(pair, drafts)
        finally:
            ended.set()
            killing.result()
            pair.restart_agent()


@pytest.mark.anyio
async def test_an_agent_killed_at_any_token_leaves_a_whole_marked_answer(tmp_path: Path) -> None:
    with running_pair(tmp_path, stoppable=True) as pair:
        prompts = await prompts_of_the_cloud(tmp_path)
        model, sampling = fake_model(0), SamplingParams(temperature=1.0, seed=SEED)

        def continued(prefix: list[int]) -> str:
            tokens = oracle.continued_alone(
                model.engine, prompts.branches, prefix, sampling, MAX_TOKENS, model.tokenizer.eos_ids
            )
            return model.tokenizer.decode(tokens)

        together, reason, degraded = ask(pair, "tree")
        assert reason in ("stop", "length") and degraded is None
        joint = model.tokenizer.encode(together)
        possible = {continued(joint[:kept]): kept for kept in range(len(joint) + 1)}
        assert len(joint) >= 3 * KILLS, "the answer is too short to be killed at so many places"
        marked = 0
        for number, messages in enumerate(range(0, len(joint), -(-len(joint) // KILLS))):
            text, reason, degraded = ask_and_kill(pair, ("none", "tree")[number % 2], messages)
            # A prefix of the joint answer, continued by the cloud alone.
            assert text in possible or text == together, messages
            assert reason in ("stop", "length")
            assert degraded == "device_lost" or text == together, messages
            marked += degraded == "device_lost"
        # The first kills come before the answer can be complete; trees may have sent all of it in a few messages.
        assert marked >= KILLS // 2
