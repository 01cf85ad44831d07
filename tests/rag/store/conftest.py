from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from paceline.postgres import SCHEMA, Postgres
from paceline.sql import Home
from tests.postgres import RealPostgres

ON_DISK = pytest.mark.parametrize("home", ["sqlite"], indirect=True)  # of tests about files


@pytest.fixture(scope="session")
def emptied(postgres: RealPostgres) -> str:
    """The URL of a database that a test empties before it uses it: faster than a new one for each."""
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector SCHEMA public")
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def home(request: pytest.FixtureRequest) -> Iterator[Home | None]:
    """Where a store is kept: a file in its folder, or an empty database."""
    if request.param == "sqlite":
        yield None
        return
    url = request.getfixturevalue("emptied")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    with closing(Postgres(url)) as database:
        yield database
