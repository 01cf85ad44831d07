"""Real servers over one database, of which one is lost or leaves in mid-answer: its clients go on at another."""

from __future__ import annotations

import asyncio

import pytest

from lab import fleet
from tests.postgres import RealPostgres

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forks")]


def check(verdict: fleet.Verdict, answers: int) -> None:
    assert verdict.answers == verdict.equal == answers, verdict.wrong
    assert verdict.lost == verdict.repeated == 0


def test_answers_of_a_killed_server_go_on_at_another(postgres: RealPostgres) -> None:
    check(asyncio.run(fleet.killed(postgres, 2)), 16)


def test_a_server_that_is_replaced_loses_no_answer(postgres: RealPostgres) -> None:
    check(asyncio.run(fleet.rolled(postgres, 1)), 8)
