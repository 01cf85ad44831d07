"""Choices of one call: documents are searched and prompts made once for all of them, and each is as it is alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api.generation.request import choices_of
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.fake import fake_model
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime import reading
from paceline.runtime.node import Node
from paceline.runtime.service import GenerateRequest, SharedPrompt
from tests.requests import a_request, changed
from tests.runtime.test_node import collect

pytestmark = pytest.mark.anyio

ASKED = a_request(
    messages=({"role": "user", "content": "Where does the red boat lie?"},),
    sampling=SamplingParams(temperature=1.0, seed=5),
    max_tokens=12,
    strategy="autoregressive",
    privacy="local-only",
)


async def written(node: Node, requests: tuple[GenerateRequest, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Text and cited passages of each."""
    texts = []
    for generation in [await node.prepare(request) for request in requests]:
        text, done = await collect(generation)
        texts.append((text, tuple(cited.passage for cited in done.citations)))
    return texts


async def test_eight_choices_are_prepared_once_and_are_those_of_eight_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    build = reading.prompts_of

    def counted(*given: object, **named: object) -> object:
        made.append(given)
        return build(*given, **named)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(reading, "prompts_of", counted)
    with DocumentStore.open(tmp_path, HashEmbedder()) as store:
        store.add_text("boat.txt", "The red boat lies in the harbour behind the old mill.", zone="cloud")
        async with Node("cloud", fake_model(), store) as node:
            alone = await written(node, choices_of(ASKED, 8))
            assert len(made) == 8
            made.clear()
            together = await written(node, choices_of(changed(ASKED, shared=SharedPrompt()), 8))
            assert len(made) == 1
            await written(node, choices_of(changed(ASKED, shared=SharedPrompt()), 2))
            assert len(made) == 2, "another call is another search"
    assert together == alone
    assert len({text for text, _ in alone}) > 1 and all(passages for _, passages in alone)
