from __future__ import annotations

import pytest

from paceline.rag.embedder import MiniLMEmbedder


@pytest.fixture(scope="session")
def minilm() -> MiniLMEmbedder:
    return MiniLMEmbedder()
