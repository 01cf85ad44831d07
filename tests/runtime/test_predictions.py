"""What a client expects the answer to be is drafted, and changes no token of it."""

from __future__ import annotations

import pytest

from paceline.core.drafting.lookup_table import LookupTable, remembered
from paceline.core.drafting.ngram_drafter import NgramDrafter
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import fake_model
from paceline.runtime.node import Node
from tests.requests import a_request, changed
from tests.runtime.test_node import collect

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


@pytest.mark.parametrize(
    ("strategy", "temperature"), [("lookup_tree", 0.0), ("lookup_tree", 1.0), ("autoregressive", 1.0)]
)
async def test_a_prediction_changes_nothing(strategy: str, temperature: float) -> None:
    asked = a_request(
        messages=({"role": "user", "content": "Tell me."},),
        sampling=SamplingParams(temperature=temperature, seed=5),
        max_tokens=60,
        strategy=strategy,
    )
    async with Node("cloud", fake_model(), None) as node:
        text, _ = await collect(await node.prepare(asked))
        for predicted in (text, text[::-1], "x" * 100_000):
            again, _ = await collect(await node.prepare(changed(asked, owner=predicted[:5], predicted=predicted)))
            assert again == text
