from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from paceline.postgres import Postgres
from paceline.sql import Home

ON_DISK = pytest.mark.parametrize("home", ["sqlite"], indirect=True)  # of tests about files


@pytest.fixture(params=["sqlite", "postgres"])
def home(request: pytest.FixtureRequest) -> Iterator[Home | None]:
    """Where a store is kept: a file in its folder, or an empty database."""
    if request.param == "sqlite":
        yield None
        return
    with closing(Postgres(request.getfixturevalue("postgres").new_database())) as database:
        yield database
