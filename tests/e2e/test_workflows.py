"""Workflows of a real pair with the demonstration models, asked by clients on either side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from paceline.strategies.base import Side
from tests.e2e.pair import QUESTION, Pair, running_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(tmp_path_factory.mktemp("pair"), model="demo") as pair:
        yield pair


def ask(client: OpenAI, workflow: str | None = None, *, model: str = "", **extension: object) -> Any:
    asked = {"report": True} | ({} if workflow is None else {"workflow": workflow}) | extension
    return client.chat.completions.create(
        model=model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=64,
        temperature=0.0,
        extra_body={"paceline": asked},
    )


def report(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["paceline"]
    return found


@pytest.mark.parametrize("workflow", ["fast", "advanced"])
@pytest.mark.parametrize("side", ["device", "cloud"])
def test_both_sides_write_the_answer_after_a_workflow(pair: Pair, side: Side, workflow: str) -> None:
    answer = ask(pair.client(side), workflow, steps=True)
    assert "Velda" in answer.choices[0].message.content
    reported = report(answer)
    assert reported["strategy"] == "aggregate" and reported["degraded"] is None
    assert f"workflow {workflow}" in reported["why"]
    stages = [step["stage"] for step in reported["steps"]]
    assert stages.count("search") == reported["stats"]["lookups"]
    assert ("rewrite" in stages) == (workflow == "advanced")
    assert "device" in {cited["side"] for cited in reported["citations"]}
    assert answer.choices[0].message.model_extra["reasoning_content"].count("\n") == len(stages)


def test_a_workflow_of_the_cloud_tells_nothing_of_private_documents(pair: Pair) -> None:
    answer = ask(pair.client("cloud"), "advanced", steps=True)
    told = answer.choices[0].message.model_extra["reasoning_content"]
    assert "landlord is called" not in told and "device.md" not in told
    assert {cited["passage"] for cited in report(answer)["citations"] if cited["side"] == "device"} == {""}


def test_the_model_s_name_asks_for_a_workflow(pair: Pair) -> None:
    client = pair.client("device")
    answer = ask(client, model=f"{client.models.list().data[0].id}:fast")
    assert "workflow fast" in report(answer)["why"]


def test_research_is_refused_where_no_web_search_is_configured(pair: Pair) -> None:
    with pytest.raises(BadRequestError, match="no provider"):
        ask(pair.client("device"), "research")


def test_a_client_that_leaves_a_workflow_leaves_nothing_behind(pair: Pair) -> None:
    client = pair.client("device")
    with client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        extra_body={"paceline": {"workflow": "advanced", "steps": True}},
    ) as events:
        next(iter(events))
    assert "Velda" in ask(client, "advanced").choices[0].message.content
