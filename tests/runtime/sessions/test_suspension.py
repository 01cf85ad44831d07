"""Code that stands still on the event loop, and what of it happens when."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from paceline.runtime.sessions.base import can_wait, run_apart, wait_for


def test_code_that_waits_goes_on_where_it_was_when_it_is_called_back() -> None:
    seen: list[str] = []
    waiting: list[Callable[[], None]] = []

    def code() -> None:
        for name in ("first", "second"):
            wait_for(waiting.append)
            seen.append(name)

    run_apart(code)
    assert seen == []
    waiting.pop()()
    assert seen == ["first"]
    waiting.pop()()
    assert seen == ["first", "second"] and not waiting


def test_only_code_that_runs_apart_can_wait() -> None:
    found: list[bool] = []
    run_apart(lambda: found.append(can_wait()))
    assert found == [True] and not can_wait()


def test_code_has_the_context_of_its_caller_after_a_wait_too() -> None:
    name: ContextVar[str] = ContextVar("name", default="")
    seen: list[str] = []
    waiting: list[Callable[[], None]] = []

    def code() -> None:
        seen.append(name.get())
        wait_for(waiting.append)
        seen.append(name.get())

    name.set("caller")
    run_apart(code)
    name.set("loop")
    waiting.pop()()
    assert seen == ["caller", "caller"] and name.get() == "loop"


def test_code_begun_by_other_code_comes_back_to_whoever_calls_it_back() -> None:
    """The inner one waits longer than the outer one, or not as long: neither is entered by the end of the other."""
    for inner_first in (True, False):
        seen: list[str] = []
        waiting: dict[str, Callable[[], None]] = {}

        def wait(name: str, seen: list[str] = seen, waiting: dict[str, Callable[[], None]] = waiting) -> None:
            wait_for(lambda go_on: waiting.update({name: go_on}))
            seen.append(name)

        def outer(wait: Callable[[str], None] = wait, seen: list[str] = seen) -> None:
            run_apart(lambda: wait("inner"))
            seen.append("begun")
            wait("outer")

        run_apart(outer)
        order = ["inner", "outer"] if inner_first else ["outer", "inner"]
        for name in order:
            waiting[name]()
            seen.append(f"after {name}")
        assert seen == ["begun", order[0], f"after {order[0]}", order[1], f"after {order[1]}"]
