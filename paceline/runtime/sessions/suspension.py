"""Code of the event loop that stands still in its middle while something else is computed, and the loop goes on.

A machine is plain code and asks for a mask in the middle of an event. Code that is `run_apart` has a stack of its own
(a greenlet), on which it can wait there; everything still happens on the loop's thread, one thing at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

from greenlet import getcurrent, greenlet


class _Apart(greenlet):
    """Marks the stacks that may be left."""


def run_apart(code: Callable[[], None]) -> None:
    """Run this until it ends or first waits. It must not raise: what follows a wait has no caller."""
    apart = _Apart(code)
    apart.gr_context = copy_context()  # else none of the caller's variables are set
    apart.switch()


def can_wait() -> bool:
    """True within `run_apart`."""
    return isinstance(getcurrent(), _Apart)


def wait_for(begin: Callable[[Callable[[], None]], None]) -> None:
    """Leave the code here until the callback that `begin` is given is called, by the loop. `begin` must not call it."""
    apart = getcurrent()

    def go_on() -> None:
        apart.parent = getcurrent()  # where it comes back to: not where it was left, which may have ended
        apart.switch()

    begin(go_on)
    assert apart.parent is not None
    apart.parent.switch()
