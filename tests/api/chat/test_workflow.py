"""`paceline.workflow`: by field or by the model's name, and the steps that a client is told of."""

from __future__ import annotations

import httpx
import pytest

from paceline.runtime.service import WorkflowStep
from tests.api.chat.test_output import stream, whole
from tests.api.generation.test_request import fault, post
from tests.api.scripted import MODEL, Script, ScriptedService, TextDelta, done

STEP = WorkflowStep("rewrite", "done", "engine 0", 0.25, "Where is the broom?")
FAILED = WorkflowStep("search far", "failed", "link", 1.0, "the other side's documents are not read")
LINES = (
    "rewrite, 0.25 s on engine 0: Where is the broom?\n"
    "search far (failed), 1.00 s on link: the other side's documents are not read\n"
)


@pytest.mark.parametrize(
    ("model", "extension", "asked"),
    [
        (MODEL.name, {}, None),
        (MODEL.name, {"workflow": "fast"}, "fast"),
        (f"{MODEL.name}:research", {}, "research"),
        (f"{MODEL.name}:advanced", {"workflow": "advanced"}, "advanced"),
    ],
)
def test_a_workflow_is_asked_for_by_field_or_name(
    http: httpx.Client, service: ScriptedService, model: str, extension: dict[str, object], asked: str | None
) -> None:
    answer = post(http, model=model, paceline=extension)
    assert answer.json()["model"] == model
    assert service.requests[-1].sources.workflow == asked


def test_the_list_has_a_switch_for_each_workflow_that_can_be_done_after_the_models(
    http: httpx.Client, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [model.name for model in service.models()]
    for workflows in (service.workflows(), ("fast", "advanced")):
        monkeypatch.setattr(service, "workflows", lambda known=workflows: known)
        listed = [each["id"] for each in http.get("/v1/models").json()["data"]]
        assert listed[: len(plain)] == plain
        assert [name for name in listed if name.startswith(f"{MODEL.name}:")] == [
            f"{MODEL.name}:{switch}" for switch in ("plain", "local-only", *workflows)
        ]


def test_a_workflow_that_means_nothing_is_refused(http: httpx.Client, service: ScriptedService) -> None:
    prompt = {"model": MODEL.name, "prompt": "Hi", "paceline": {"workflow": "fast"}}
    for refused in (post(http, paceline={"workflow": "slow"}), http.post("/v1/completions", json=prompt)):
        assert fault(refused)["param"] == "paceline.workflow"
    assert not service.requests


def test_steps_are_reasoning_in_a_stream_and_as_a_whole(http: httpx.Client, service: ScriptedService) -> None:
    steps = [TextDelta("", 0, step=step) for step in (STEP, FAILED)]
    service.script = Script([*steps, TextDelta("Hi", 2), done(steps=(STEP, FAILED))])
    chunks = stream(http, paceline={"workflow": "advanced", "steps": True})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == LINES
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hi"
    told = [chunk["paceline"]["step"]["unit"] for chunk in chunks if "step" in chunk.get("paceline", {})]
    assert told == ["engine 0", "link"]
    message = whole(http, paceline={"workflow": "advanced", "steps": True})["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", LINES)
