from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.rag.parsing.process import ParserProcess


@pytest.fixture(scope="module")
def parser() -> Iterator[ParserProcess]:
    with ParserProcess() as started:
        yield started
