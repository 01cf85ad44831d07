"""What is expected of a workflow beyond what is observed: which stages its agents add, and how much work those are.

A template counts, over the workflows that have ended, how often a deciding stage led to another stage, and the items of
each. It begins with priors, which weigh as much as a few workflows. See `builder` for the sub-stages themselves.

Stages named `public` read what came of the cloud or of the web alone; a rerank or a refinement without that word may
read private passages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline.workflow.units import WorkflowModels

PRIOR_WEIGHT: Final = 4.0  # workflows
DAMPING: Final = 0.9  # of what lies one stage further, so that loops end
MAX_DEPTH: Final = 12  # stages
REFINED: Final = 32  # tokens of a refined text, as expected at first
WRITTEN: Final = 24  # tokens of sub-questions, as expected at first
ANSWER: Final = 24  # tokens, as expected at first
Expected = dict[str, tuple[str, float, dict[str, float]]]  # stage -> see `WorkflowTemplate`


@dataclass(slots=True)
class _Mean:
    total: float
    weight: float

    def add(self, value: float) -> None:
        self.total += value
        self.weight += 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(slots=True)
class ExpectedStage:
    """Operation and mean items of a stage, with the probability of each stage that may follow because of it."""

    operation: str
    items: _Mean
    follows: dict[str, _Mean] = field(default_factory=dict)


class WorkflowTemplate:
    """Expected stages of one kind of workflow."""

    def __init__(self, name: str, stages: Mapping[str, tuple[str, float, Mapping[str, float]]]) -> None:
        """stages: name -> (operation, items, stage that may be added because of it -> probability)."""
        self.name = name
        self.revision = 0
        self._stages = {
            stage: ExpectedStage(
                operation,
                _Mean(items * PRIOR_WEIGHT, PRIOR_WEIGHT),
                {after: _Mean(chance * PRIOR_WEIGHT, PRIOR_WEIGHT) for after, chance in follows.items()},
            )
            for stage, (operation, items, follows) in stages.items()
        }

    def future(self, stage: str, seconds: Callable[[str, int], float], depth: int = MAX_DEPTH) -> float:
        """Expected seconds of what a stage leads to and nothing was seen of yet (CS_F of eq. 4).

        The sum over stages that may follow, of their probability times their own seconds and their future; each hop
        counts less. seconds: of an operation with so many items. Stages that are part of a workflow from its beginning
        are observed and do not count. 0 for a stage that is not in the template.
        """
        expected = self._stages.get(stage)
        if expected is None or not depth:
            return 0.0
        total = 0.0
        for after, chance in expected.follows.items():
            following = self._stages.get(after)
            if following is not None:
                own = seconds(following.operation, max(1, round(following.items.value)))
                total += chance.value * (own + self.future(after, seconds, depth - 1))
        return DAMPING * total

    def expected_items(self, stage: str) -> int | None:
        """Mean items of a stage; None where the template lacks it."""
        expected = self._stages.get(stage)
        return None if expected is None else max(1, round(expected.items.value))

    def record_items(self, stage: str, items: int) -> None:
        """A sub-stage of a stage has ended after so many items."""
        if stage in self._stages:
            self._stages[stage].items.add(items)
            self.revision += 1

    def record_decision(self, stage: str, followed: Iterable[str]) -> None:
        """A deciding sub-stage has ended and led to these stages."""
        if stage not in self._stages:
            return
        follows, seen = self._stages[stage].follows, set(followed)
        for after in seen & set(self._stages) - set(follows):
            follows[after] = _Mean(0.0, PRIOR_WEIGHT)
        for after, chance in follows.items():
            chance.add(1.0 if after in seen else 0.0)
        self.revision += 1


def templates(models: WorkflowModels | None = None) -> dict[str, WorkflowTemplate]:
    """A fresh template of each workflow: what its agents are expected to add."""
    names = models or WorkflowModels()
    agent, chat = names.agent, names.chat
    searched: Expected = {
        "rewrite.decode": (f"{agent}/decode", WRITTEN, {"embed question": 1.0}),
        "embed question": (f"{names.embed}/encode", 1, {"rerank": 1.0}),
        "rerank": (f"{names.rerank}/score", 8, {"refine.prefill": 1.0}),
        "refine.prefill": (f"{agent}/prefill", 300, {"refine.decode": 1.0}),
        "refine.decode": (f"{agent}/decode", REFINED, {}),
        "answer.decode": (f"{chat}/decode", ANSWER, {}),
    }
    # `search far` is no part of what a rewriting is expected to lead to until a workflow has shown that it is
    public: Expected = {
        "search far": (f"{names.far}/search", 1, {"rerank public": 1.0}),
        "rerank public": (f"{names.rerank}/score", 8, {"refine public.prefill": 1.0}),
        "refine public.prefill": (f"{agent}/prefill", 300, {"refine public.decode": 1.0}),
        "refine public.decode": (f"{agent}/decode", REFINED, {}),
    }
    asked: Expected = {
        "plan.decode": (f"{agent}/decode", WRITTEN, {"fetch": 0.8}),
        "look.decode": (f"{agent}/decode", 8, {"fetch": 0.3}),
        "search web": (f"{names.web}/search", 1, {"fetch": 1.0}),
        "fetch": (f"{names.web}/fetch", 1, {"embed page": 1.0}),
        "embed page": (f"{names.embed}/encode", 6, {"rerank public": 1.0}),
    }
    fast = {name: searched[name] for name in ("answer.decode",)}
    return {
        "fast": WorkflowTemplate("fast", fast),
        "advanced": WorkflowTemplate("advanced", searched | public),
        "research": WorkflowTemplate("research", searched | public | asked),
    }
