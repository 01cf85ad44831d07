from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rag.web.site import Site, serving


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as made:
        yield made
