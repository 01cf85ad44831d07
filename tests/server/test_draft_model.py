"""The setting `draft_model`: which models are let in, and what a node does with one."""

from __future__ import annotations

import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from paceline.core.batching.segment import Batch, SeqId
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel, Output
from paceline.engine.fake import ByteTokenizer, FakeEngine, fake_model
from paceline.errors import ConfigError
from paceline.runtime.node import Node
from paceline.runtime.resources import Computing, NodeParts
from paceline.runtime.service import GenerationResult, TextDelta
from paceline.settings import ServerSettings
from server.program import opened_draft
from tests.requests import a_request


def test_none_is_loaded_unless_it_is_named(tmp_path: Path) -> None:
    assert opened_draft(ServerSettings(state_dir=tmp_path)) is None


def test_a_draft_model_of_the_same_vocabulary_is_loaded(tmp_path: Path) -> None:
    load = opened_draft(ServerSettings(model="fake", draft_model="fake:3", state_dir=tmp_path))
    assert load is not None
    assert isinstance(load(fake_model()), FakeEngine)


def test_a_wrong_name_is_said_before_any_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file small\.gguf"):
        opened_draft(ServerSettings(draft_model="small.gguf", state_dir=tmp_path))


def test_another_vocabulary_is_refused_with_a_sentence(tmp_path: Path) -> None:
    load = opened_draft(ServerSettings(draft_model="fake", state_dir=tmp_path))
    assert load is not None

    class Other(ByteTokenizer):
        fingerprint = "another"

    with pytest.raises(ConfigError, match=r"The draft model fake cannot draft for demo: its vocabulary has"):
        load(LoadedModel(FakeEngine(), Other()))


class Noted(FakeEngine):
    """A draft model that says when it has been asked."""

    def __init__(self, seed: int, spread: float) -> None:
        super().__init__(seed=seed, spread=spread)
        self.forwards = 0
        self.has_drafted = threading.Event()

    def forward(self, batch: Batch) -> Output:
        self.forwards += 1
        if self.forwards == 1:
            self.has_drafted.set()
        return super().forward(batch)


class Behind(FakeEngine):
    """A model that is no faster than its draft model."""

    def __init__(self, draft: Noted) -> None:
        super().__init__(seed=1, spread=0.3)
        self._draft = draft

    def forward(self, batch: Batch) -> Output:
        self._draft.has_drafted.wait()
        return super().forward(batch)


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["pipeline", "lookup_tree"])
async def test_an_answer_is_the_same_with_a_draft_model_which_is_released(strategy: str) -> None:
    texts: list[str] = []
    for draft in (None, Noted(seed=1, spread=0.3), FakeEngine(capacity_rows=8)):
        target = Behind(draft) if isinstance(draft, Noted) else FakeEngine(seed=1, spread=0.3)
        model = LoadedModel(target, ByteTokenizer())
        async with Node("cloud", model, None, NodeParts(computing=Computing(draft_engine=draft))) as node:
            text, result = await answer(node, strategy)
        texts.append(text)
        is_asked = isinstance(draft, Noted)
        assert (result.stats["draft_forwards"] > 0) == is_asked, "one without memory for the answer is not asked"
        if draft is not None:
            draft.check()
            assert not any(draft.length(SeqId(seq)) for seq in range(1, 9))
    assert len(set(texts)) == 1


async def answer(node: Node, strategy: str) -> tuple[str, GenerationResult]:
    session = await node.prepare(
        a_request(
            messages=({"role": "user", "content": "Where is the key?"},),
            sampling=SamplingParams(temperature=1.0, seed=5),
            max_tokens=30,
            strategy=strategy,
        )
    )
    text = ""
    async with aclosing(session.run()) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                text += event.text
            else:
                return text, event
    raise AssertionError("no result")
