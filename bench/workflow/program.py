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
from paceline.core.addresses import Address
from paceline.rag.web import PageFetcher
from paceline.runtime.workflows import driver, run, web
from paceline.workflow import agents
from paceline.workflow.agents import MAX_STATEMENTS, AgentTask, most_statements
from paceline.workflow.flows import WorkflowSizes
from paceline.workflow.scheduler import WorkflowScheduler

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

    def _next(self, count: int) -> list[str]:
        found, self._left = self._left[: max(0, count)], self._left[max(0, count) :]
        return found


Script = Mapping[str, Mapping[str, Sequence[str]]]  # question -> agent -> queries


def scripted(script: Script, name: str, ask: Callable[..., AgentTask[Any]]) -> Callable[..., AgentTask[Any]]:
    """An agent that asks for what the script has."""

    def asked(question: str, *read: Any) -> AgentTask[Any]:
        queries = script.get(question, {}).get(name, ())
        return replace(ask(question, *read), max_tokens=TOKENS, parser=lambda: ScriptedQueries(queries))

    return asked


def short(
    question: str, passages: Sequence[Any], refine: Callable[..., AgentTask[Any]] = agents.refine
) -> AgentTask[Any]:
    return replace(refine(question, passages), max_tokens=TOKENS * most_statements(len(passages)) // MAX_STATEMENTS)


def together(**sizes: Any) -> WorkflowSizes:
    """Sizes of a workflow that refines the passages of both sides together."""
    return WorkflowSizes(**sizes | {"apart": False})


def is_loopback(address: Address) -> bool:
    return address.is_loopback


if __name__ == "__main__":
    # {"policy": fields, "apart": whether zones are refined apart, "script": {question: {agent: [queries]}}}
    given = json.loads(Path(sys.argv.pop(1)).read_text())
    sys.path.insert(0, str(Path(__file__).parents[2]))  # it is run by its path, and `lab` is not installed
    from lab.scheduling import AblatedScheduler, Ablation

    policy = Ablation(**given["policy"])
    setattr(driver, WorkflowScheduler.__name__, partial(AblatedScheduler, ablation=policy))  # it is made there
    if not given["apart"]:
        setattr(run, WorkflowSizes.__name__, together)
    setattr(web, PageFetcher.__name__, partial(PageFetcher, allowed=is_loopback, ports=range(1, 65_536)))
    for name in ("rewrite", "plan", "look"):
        setattr(agents, name, scripted(given["script"], name, getattr(agents, name)))
    setattr(agents, agents.refine.__name__, short)
    main()
