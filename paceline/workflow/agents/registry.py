"""The agents by the stage of `WorkflowBuilder` that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from paceline.workflow.agents.agent import Agent
from paceline.workflow.agents.answer import ANSWER, AnswerInputs, CitedAnswer, SourceCitation
from paceline.workflow.agents.look import LOOK, LookInputs
from paceline.workflow.agents.plan import PLAN, PlanInputs
from paceline.workflow.agents.queries import Queries
from paceline.workflow.agents.records import Evidence
from paceline.workflow.agents.refine import REFINE, RefineInputs
from paceline.workflow.agents.rewrite import REWRITE, RewriteInputs
from paceline.workflow.agents.statements import Refined

AnyAgent: TypeAlias = (
    Agent[RewriteInputs, str, Queries]
    | Agent[PlanInputs, str, Queries]
    | Agent[LookInputs, str, Queries]
    | Agent[RefineInputs, Evidence, Refined]
    | Agent[AnswerInputs, SourceCitation, CitedAnswer]
)
_ALL: Final[tuple[AnyAgent, ...]] = (REWRITE, PLAN, LOOK, REFINE, ANSWER)
AGENTS: Final[Mapping[str, AnyAgent]] = {agent.stage: agent for agent in _ALL}
