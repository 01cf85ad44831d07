"""The rules of an owner over several servers: what one has seen holds at the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from paceline.core.policy import DocumentFacts, DocumentRule, Pattern, Policy
from paceline.postgres import Postgres
from paceline.rag.store.readable import RuledDocument
from paceline.runtime.policy import PolicyGuard
from tests.postgres import RealPostgres
from tests.requests import a_request

TEXT = "The combination of the safe behind the picture is 34 right, 12 left, 7 right, as the locksmith wrote down."
ASKED = ({"role": "user", "content": "What did the locksmith write?"},)
RULES = Policy(
    (DocumentRule("never leaves", Pattern.parse("safe.md", "/home/me")),),
    budgets={"cloud_tokens": 100.0, "bytes": 1e6},
)
DOCUMENT = RuledDocument("doc-1", "safe.md", "safe", DocumentFacts(("/home/me/safe.md",)), RULES.rules)


@contextmanager
def guards(one: Postgres, other: Postgres) -> Iterator[tuple[PolicyGuard, PolicyGuard]]:
    sides = [closing(PolicyGuard("cloud", RULES, each)) for each in (one, other)]
    with sides[0] as first, sides[1] as second:
        yield first, second


def level_at(guard: PolicyGuard, *said: str) -> str:
    request = a_request(messages=(*({"role": "user", "content": each} for each in said), *ASKED), privacy="open")
    return guard.decide(request, "m").level


def test_what_one_server_has_written_is_held_at_the_other_and_budgets_are_of_both(
    servers: tuple[Postgres, Postgres],
) -> None:
    with guards(*servers) as (first, second):
        assert level_at(second, TEXT) == "open"
        first.remember(TEXT, "local-only")
        first.written().result()
        assert level_at(second, f"Shorten this: {TEXT}") == "local-only" and level_at(second, "Hello") == "open"
        first.spend("cloud_tokens", 60.0)
        second.spend("cloud_tokens", 30.0)
        first._save()
        first.written().result()
        assert level_at(second, "Hello") == "open" and second.left()["cloud_tokens"] == 10.0
        second.spend("cloud_tokens", 10.0)
        assert level_at(second, "Hello") == "local-only"
        assert second.state.confirmed() == frozenset()
        first.state.confirm(DOCUMENT)
        assert second.state.mark(DOCUMENT.identity) in second.state.confirmed()


def test_while_the_database_is_away_nothing_leaves_and_what_was_remembered_is_kept_for_its_return(
    postgres: RealPostgres, servers: tuple[Postgres, Postgres]
) -> None:
    with guards(*servers) as (first, second):
        postgres.kill()
        try:
            first.remember(TEXT, "local-only")
            assert level_at(first, "Hello") == "local-only" and [*first.used_up()] == ["cloud_tokens", "bytes"]
        finally:
            postgres.start()
        assert level_at(first, "Hello") == "open", "no server needs a restart"
        assert level_at(second, TEXT) == "local-only"
