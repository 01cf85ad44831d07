from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from paceline.postgres import Postgres
from tests.postgres import RealPostgres


@pytest.fixture
def url(postgres: RealPostgres) -> str:
    """Of an empty database."""
    return postgres.new_database()


@pytest.fixture
def servers(url: str) -> Iterator[tuple[Postgres, Postgres]]:
    """Two servers' connections to one database."""
    with closing(Postgres(url)) as first, closing(Postgres(url)) as second:
        first.join("http://a")
        second.join("http://b")
        yield first, second
