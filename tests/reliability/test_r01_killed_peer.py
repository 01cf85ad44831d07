"""R1: `kill -9` of the peer in mid-answer. The stream completes, no text is lost or repeated, and it is marked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lab.baselines.dragon import Shape, shaped
from paceline.commands.demo import store_of
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import fake_model
from paceline.rag.embedder import load_embedder
from paceline.rag.store.documents import DocumentStore
from paceline.rag.store.readable import unruled
from paceline.runtime.sessions.prompts import PromptSet, prompts_of
from tests.e2e.pair import DEVICE, QUESTION, Pair, running_pair
from tests.reliability.conftest import Figure, Size
from tests.reliability.real_server import quantile
from tests.reliability.streams import Stream
from tests.strategies import oracle

MAX_TOKENS = 60
SEED = 4


def prompts_of_the_cloud(directory: Path) -> PromptSet:
    """The server's branches for the question."""
    model = fake_model(0)
    messages = [{"role": "user", "content": QUESTION}]
    with DocumentStore.open(store_of(directory, "cloud"), load_embedder("hash")) as store:
        return prompts_of(messages, unruled(store), model.tokenizer, k=2, max_prompt=2048)


def ask(pair: Pair, drafts: Shape) -> Stream:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": SEED,
        "paceline": {"device": DEVICE, "report": True} | shaped(drafts),
    }
    return Stream(pair.url("cloud"), body)


def ask_and_kill(pair: Pair, drafts: Shape, messages: int) -> tuple[Stream, float]:
    """An answer during which the agent is killed as soon as it sends one more than `messages` messages, and the longest
    gap after that, s."""
    turnstile = pair.turnstile
    assert turnstile is not None
    turnstile.let(messages)
    answer = ask(pair, drafts)
    while not (turnstile.held.wait(0.02) or answer.ended):
        pass  # an answer may need fewer messages
    pair.kill_agent()
    killed = time.monotonic()
    turnstile.cut()
    try:
        return answer.join(), answer.gap_after(killed)
    finally:
        pair.restart_agent()


@pytest.mark.anyio
async def test_an_agent_killed_at_any_token_leaves_a_whole_marked_answer(
    tmp_path: Path, size: Size, figure: Figure
) -> None:
    kills, gaps = size(3, MAX_TOKENS), list[float]()
    with running_pair(tmp_path, stoppable=True) as pair:
        prompts = prompts_of_the_cloud(tmp_path)
        model, sampling = fake_model(0), SamplingParams(temperature=1.0, seed=SEED)

        def continued(prefix: list[int]) -> str:
            tokens = oracle.continued_alone(
                model.engine, prompts.branches, prefix, sampling, MAX_TOKENS, model.tokenizer.eos_ids
            )
            return model.tokenizer.decode(tokens)

        together = ask(pair, "tree").join()
        assert together.whole and together.degraded is None, together.error
        joint = model.tokenizer.encode(together.text)
        possible = {continued(joint[:kept]): kept for kept in range(len(joint) + 1)}
        assert len(joint) >= 3 * min(kills, 10), "the answer is too short to be killed at so many places"
        marked = 0
        for number, messages in enumerate(range(0, len(joint), -(-len(joint) // kills))):
            answer, gap = ask_and_kill(pair, ("none", "tree")[number % 2], messages)
            # A prefix of the joint answer, continued by the cloud alone.
            assert answer.text in possible or answer.text == together.text, messages
            assert answer.whole, answer.error
            assert answer.degraded == "device_lost" or answer.text == together.text, messages
            marked += answer.degraded == "device_lost"
            gaps.append(gap)
        # The first kills come before the answer can be complete; trees may have sent all of it in a few messages.
        assert marked >= kills // 2
    figure("gap until the next token, p95", quantile(gaps, 0.95), at_most=2.0, unit="s")
    figure("worst", max(gaps), at_most=5.0, unit="s")
    figure("answers marked", marked)
