"""`kill -9` in mid-answer: the stream completes, nothing is lost or written twice, and the last event says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.commands.pair import store_of
from paceline.core.sampling import SamplingParams
from paceline.engine.fake import fake_model
from paceline.rag.embed import load_embedder
from paceline.rag.store import DocumentStore
from paceline.runtime.reading import Reading, read
from tests.e2e.pair import QUESTION, running_pair
from tests.strategies import oracle

MAX_TOKENS = 60
SEED = 4
KILLS = 10
# One token then takes at least a round trip, so that the kill meets the answer in its middle.
SLOW_LINK = ("--emulate", "rtt=40ms")


async def reading_of_the_cloud(directory: Path) -> Reading:
    """The branches the server must have continued."""
    model = fake_model(0)
    messages = [{"role": "user", "content": QUESTION}]
    with DocumentStore.open(store_of(directory, "cloud"), load_embedder("hash")) as store:
        return await read(messages, store, model.tokenizer, k=2, max_prompt=2048)


@pytest.mark.anyio
@pytest.mark.timeout(300)
async def test_an_agent_killed_at_any_token_leaves_a_whole_marked_answer(tmp_path: Path) -> None:
    with running_pair(tmp_path, agent_flags=SLOW_LINK) as pair:
        reading = await reading_of_the_cloud(tmp_path)
        model, sampling = fake_model(0), SamplingParams(temperature=1.0, seed=SEED)

        def ask(kill_at: int | None, drafts: str = "tree") -> tuple[str, str | None, str | None]:
            """(text, finish reason, degraded)"""
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
            delivered = 0
            for chunk in stream:
                if kill_at is not None and delivered >= kill_at and degraded is None:
                    pair.kill_agent()
                    kill_at = None
                piece = chunk.choices[0].delta.content or ""
                delivered += bool(piece)
                text += piece
                reason = chunk.choices[0].finish_reason or reason
                extra = (chunk.model_extra or {}).get("paceline") or {}
                degraded = extra.get("degraded", degraded)
            return text, reason, degraded

        def continued(prefix: list[int]) -> str:
            tokens = oracle.continued_alone(
                model.engine, reading.branches, prefix, sampling, MAX_TOKENS, model.tokenizer.eos_ids
            )
            return model.tokenizer.decode(tokens)

        together, reason, degraded = ask(None)
        assert reason in ("stop", "length") and degraded is None
        joint = model.tokenizer.encode(together)
        possible = {continued(joint[:kept]): kept for kept in range(len(joint) + 1)}
        assert len(joint) >= 3 * KILLS, "the answer is too short to be killed at so many places"
        marked = 0
        for number, kill_at in enumerate(range(0, len(joint), -(-len(joint) // KILLS))):
            drafts = ("none", "tree")[number % 2]
            text, reason, degraded = ask(kill_at, drafts)
            # Some prefix of the joint answer, at least what had been delivered, then the cloud alone over it.
            assert text in possible or text == together, kill_at
            assert text[:kill_at] == together[:kill_at]
            assert reason in ("stop", "length")
            assert degraded == "device_lost" or text == together, kill_at
            marked += drafts == "none" and degraded == "device_lost"
            pair.restart_agent()
        # A kill changes nothing when all targets are on their way already: soon, where both sides foretell an answer
        # that they have written before; token by token at its end alone, and a token need not be a piece of text.
        assert marked >= KILLS // 2 - 2
