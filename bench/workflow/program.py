"""`paceline` for the bench of real units: another policy of the scheduler, scripted decisions, pages from loopback.

Run in place of the program, with a file of JSON before its arguments; no setting of the program leads here. The
demonstration model writes its texts, token by token, but decides nothing sensible in them: what an agent asks for is
taken from the script instead, one question after each `EVERY` characters of its text and the rest at its end. Texts of
agents are shorter than in the program (`TOKENS`), since nobody reads more of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline.commands.main import main
from paceline.core.strangers import Address
from paceline.rag.web.fetch import PageFetcher
from paceline.runtime.workflows import lookup, run, web
from paceline.runtime.workflows import lookup as lookup_module
from paceline.runtime.workflows import run as run_module
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.workflow.agents.roles import Queries
from paceline.workflow.placement import SchedulingPolicy

TOKENS: Final = 32  # of a text of an agent, at most
EVERY: Final = 24  # characters of a text until its next decision


class ScriptedQueries:
    """Decides what the script has, as the text goes on. Reads nothing of it but how long it is."""

    def __init__(self, queries: Sequence[str]) -> None:
        self._left = list(queries)
        self._all = tuple(queries)
        self._characters = 0
        self.done = False  # the model writes its text to the end

    def feed(self, piece: str) -> list[str]:
        self._characters += len(piece)
        return self._next(self._characters // EVERY - (len(self._all) - len(self._left)))

    def end(self) -> list[str]:
        return self._next(len(self._left))

    def result(self) -> Queries:
        return Queries(self._all, fallback=False, declined=False, dropped=0)

    def _next(self, count: int) -> list[str]:
        found, self._left = self._left[: max(0, count)], self._left[max(0, count) :]
        return found


def scripted(script: Mapping[str, Mapping[str, Sequence[str]]], agent: str) -> Callable[[Any], ScriptedQueries]:
    return lambda inputs: ScriptedQueries(script.get(inputs.question, {}).get(agent, ()))


def is_loopback(address: Address) -> bool:
    return address.is_loopback


if __name__ == "__main__":
    # {"policy": fields, "apart": whether zones are refined apart, "script": {question: {agent: [queries]}}}
    given = json.loads(Path(sys.argv.pop(1)).read_text())
    policy = SchedulingPolicy(**given["policy"])
    setattr(run_module, WorkflowDriver.__name__, partial(WorkflowDriver, policy=policy))  # both are made there
    if not given["apart"]:
        setattr(run, run.refined_apart.__name__, lambda **_: False)
    setattr(web, PageFetcher.__name__, partial(PageFetcher, allowed=is_loopback, ports=range(1, 65_536)))
    for module, name in ((lookup_module, "REWRITE"), (web, "PLAN"), (web, "LOOK")):
        agent = getattr(module, name)
        setattr(module, name, replace(agent, parser=scripted(given["script"], agent.stage)))
    for module, name in (
        (run, "REWRITE"),
        (lookup, "REFINE"),
        (web, "PLAN"),
        (web, "LOOK"),
    ):
        setattr(module, name, replace(getattr(module, name), max_tokens=TOKENS))
    main()
