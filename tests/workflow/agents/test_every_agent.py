"""Laws of all agents: no text raises, how it is cut changes nothing, decisions are within their limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.workflow.agents.records import AgentParser, Evidence, Prompt
from paceline.workflow.agents.roles import (
    AGENTS,
    ANSWER,
    LOOK,
    MAX_STATEMENT,
    PLAN,
    REFINE,
    REWRITE,
    AnswerInputs,
    CitedAnswer,
    LookInputs,
    PlanInputs,
    Queries,
    Refined,
    RefineInputs,
    RewriteInputs,
)
from paceline.workflow.builder import PUBLIC, WORKFLOWS, WorkflowBuilder, WorkflowSizes
from tests.workflow.agents.texts import MILLS, QUESTION, cut_texts, passage, read

EVIDENCE = tuple(Evidence.of(each) for each in MILLS)
LONG = Evidence.of(passage("mill " * 300))
PARSERS: dict[str, Callable[[], AgentParser[object, object]]] = {
    "rewrite": lambda: REWRITE.parser(RewriteInputs(QUESTION)),
    "plan": lambda: PLAN.parser(PlanInputs(QUESTION)),
    "look": lambda: LOOK.parser(LookInputs(QUESTION, EVIDENCE)),
    "refine": lambda: REFINE.parser(RefineInputs(QUESTION, MILLS)),
    "answer": lambda: ANSWER.parser(AnswerInputs(QUESTION, EVIDENCE)),
}


@pytest.mark.parametrize("stage", PARSERS)
@settings(max_examples=150)
@given(cut=cut_texts())
@example(cut=("", [""]))
@example(cut=("mill?\r\nmill!", ["mill?\r", "\nmill!"]))
def test_any_text_is_read_and_how_it_is_cut_changes_nothing(stage: str, cut: tuple[str, list[str]]) -> None:
    text, pieces = cut
    whole, result = read(PARSERS[stage](), [text])
    assert (whole, result) == read(PARSERS[stage](), pieces) == read(PARSERS[stage](), list(text))
    match result:
        case Queries():
            most, max_chars = {"rewrite": (4, 300), "plan": (3, 200), "look": (2, 200)}[stage]
            assert tuple(whole) == result.texts and len(whole) <= most
            assert all(len(each) <= max_chars and each.splitlines() == [each] for each in result.texts)
            assert len({each.casefold() for each in result.texts}) == len(whole)
            if stage == "rewrite":
                assert whole and (not result.fallback or whole == [QUESTION])
        case Refined():
            assert tuple(whole) == result.evidence
            if result.fallback:
                assert result.evidence == EVIDENCE
            else:
                assert 1 <= len(whole) <= 4 and all(1 <= len(each.text) <= MAX_STATEMENT for each in result.evidence)
                assert all({*each.sources} <= {*MILLS} and "[1]" not in each.text for each in result.evidence)
        case CitedAnswer():
            assert tuple(whole) == result.citations and {*result.sources} <= {*MILLS}
            for each in result.citations:
                assert (text[each.start], text[each.end - 1]) in {("[", "]"), ("【", "】")}
                assert MILLS[each.number - 1] == each.source


@pytest.mark.parametrize("stage", PARSERS)
@settings(max_examples=60)
@given(cut=cut_texts())
def test_nothing_that_follows_matters_when_a_parser_is_done(stage: str, cut: tuple[str, list[str]]) -> None:
    parser, stopped = PARSERS[stage](), PARSERS[stage]()
    for piece in cut[1]:
        parser.feed(piece)
        if not stopped.done:
            stopped.feed(piece)
    assert parser.end() == stopped.end() and parser.result() == stopped.result()


def test_the_agents_are_the_stages_of_the_workflows() -> None:
    stages: set[str] = set()
    for workflow in WORKFLOWS:
        builder = WorkflowBuilder(workflow, WorkflowSizes(question=8, chunks=4))
        nodes = builder.begin()
        nodes += builder.sub_question() if builder.rewrite is not None else []
        nodes += builder.web_request(builder.plan, 4) if builder.plan is not None else []
        stages |= {node.stage.removesuffix(".decode").removesuffix(PUBLIC) for node in nodes if ".decode" in node.stage}
    assert stages == {*AGENTS} == {*PARSERS}
    assert [stage for stage, agent in AGENTS.items() if agent.max_tokens is None] == ["answer"]


def size(prompt: Prompt) -> int:
    return sum(len(str(message["content"])) for message in prompt)


@given(limit=st.integers(0, 4000))
def test_inputs_are_shortened_until_they_fit(limit: int) -> None:
    def fits(prompt: Prompt) -> bool:
        return size(prompt) <= limit

    talk = [{"role": role, "content": "the mill " * 40} for role in ("user", "assistant") * 3]
    rewrite = RewriteInputs(QUESTION, talk)
    refine = RefineInputs(QUESTION, (*MILLS, passage("mill " * 300)))
    look, answer = LookInputs(QUESTION, (*EVIDENCE, LONG)), AnswerInputs(QUESTION, (*EVIDENCE, LONG))
    for prompt in (
        (kept := REWRITE.fitted(rewrite, fits)) and REWRITE.messages(kept),
        (fitting := REFINE.fitted(refine, fits)) and REFINE.messages(fitting),
        (seen := LOOK.fitted(look, fits)) and LOOK.messages(seen),
        (found := ANSWER.fitted(answer, fits)) and ANSWER.messages(found),
    ):
        assert prompt is None or size(prompt) <= limit
    if limit >= size(ANSWER.messages(answer)):
        assert found == answer
    assert (found is None) == (limit < len(QUESTION))
    plan = PlanInputs(QUESTION)
    assert PLAN.fitted(plan, fits) == (plan if fits(PLAN.messages(plan)) else None)
