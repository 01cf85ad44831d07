"""What a client expects the answer to be is drafted, and changes no token of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.drafting.lookup_table import LookupTable, remembered
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import fake_model
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, TextDelta
from tests.requests import a_request, changed

pytestmark = pytest.mark.anyio


def test_a_predicted_text_is_drafted_from_where_the_answer_has_met_it() -> None:
    text = list(range(2, 40))
    drafter = NgramDrafter(LookupTable(64), SamplingParams(temperature=0.0), predicted=remembered(text))
    for token in (50, 1, *text[:20]):
        drafter.observe(token)
    drafted = drafter.draft(8, 20)
    assert drafted.tokens == tuple(text[20:28]) and min(drafted.probs) > 0.3
    drafter.observe(63)  # the answer has left it
    assert not drafter.draft(8, 21).tokens


async def written(node: Node, request: GenerateRequest) -> str:
    events = [event async for event in (await node.prepare(request)).run()]
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("strategy", ["lookup_tree", "autoregressive"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_prediction_changes_nothing(tmp_path: Path, strategy: str, temperature: float) -> None:
    asked = a_request(
        messages=({"role": "user", "content": "Tell me."},),
        sampling=SamplingParams(temperature=temperature, seed=5),
        max_tokens=120,
        strategy=strategy,
        documents=0,
    )
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        async with Node("cloud", fake_model(), store) as node:
            text = await written(node, asked)
            for predicted in (text, text[::-1], "x" * 100_000):
                assert await written(node, changed(asked, owner=predicted[:5], predicted=predicted)) == text
