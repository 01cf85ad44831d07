"""An answer that says that no document answers cites none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import LoadedModel, ModelInfo
from paceline.engine.fake import EOS, ByteTokenizer, FakeEngine
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from paceline.runtime.service import GenerationResult
from tests.requests import a_request
from tests.runtime.test_node import collect

pytestmark = pytest.mark.anyio

ASKED = a_request(
    ({"role": "user", "content": "Where is the red boat of the old mill?"},),
    SamplingParams(temperature=0.0, logit_bias={EOS: -100.0}),
    16,
    strategy="autoregressive",
)


class Refusing(FakeEngine):
    """Has words for a refusal."""

    words: str = ""

    @property
    def info(self) -> ModelInfo:
        return replace(super().info, refusals=(self.words,))


async def answer(folder: Path, words: str) -> tuple[str, GenerationResult]:
    engine = Refusing(1)
    engine.words = words
    with DocumentStore.open(folder, HashEmbedder()) as store:
        store.add_text("boats.md", "The red boat lies behind the old mill.", zone="cloud")
        store.add_text("mills.md", "The old mill has a red roof and a boat.", zone="cloud")
        async with Node("cloud", LoadedModel(engine, ByteTokenizer()), store) as node:
            return await collect(await node.prepare(ASKED))


async def test_an_answer_that_is_a_refusal_cites_nothing_and_any_other_what_decided_it(tmp_path: Path) -> None:
    text, done = await answer(tmp_path, "")
    assert done.citations and len(text.strip()) > 4
    same, refused = await answer(tmp_path, text.strip().removesuffix("."))
    assert same == text and refused.citations == () and refused.found == done.found
    assert (await answer(tmp_path, text.strip()[:-2]))[1].citations == done.citations, "it says more than that"
