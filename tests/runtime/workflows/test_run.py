"""Workflows on a real node: what agents write decides what is searched, faults leave stages out, and leaving stops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from paceline.api.generation.streaming import GenerationFanIn
from paceline.api.observation import Observer
from paceline.core.side import Side
from paceline.errors import PacelineError, RequestError, StorageError
from paceline.rag.records import Passage, Vectors
from paceline.runtime import admission
from paceline.runtime.service import GenerateEvent, GenerateRequest, Generation, GenerationResult, TextDelta
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import Admit
from paceline.runtime.units import LANES, NodeUnits, UnitRegistry
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.lookup import Found
from paceline.runtime.workflows.run import WorkflowRun
from paceline.workflow.flows import FLOWS, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import Launch, Outcome, Stage
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes, stores_of

pytestmark = pytest.mark.anyio

ASKED = changed(REQUEST, workflow="advanced", steps=True, strategy="auto")
BROOM = Found(Passage("rooms.md", 1, "", "The broom is in the hall.", 0.5), "device", private=True)
KEY = Found(Passage("keys.md", 2, "", "The key is under the broom.", 0.6), "device", private=True)
MAP = Found(Passage("map.md", -1, "", "The hall is in the east.", 0.4), "cloud", private=False)


INSTRUCTIONS = {
    "Split the question": "rewrite",
    "short statements": "refine",
    "web searches would help": "plan",
    "missing in the quotes": "look",
}


@dataclass
class ScriptedPlaces:
    """Passages by a word of the query. faults: names of methods that fail."""

    here: dict[str, Found] = field(default_factory=dict)
    far: dict[str, Found] = field(default_factory=dict)
    faults: frozenset[str] = frozenset()
    queries: list[str] = field(default_factory=list)
    told_far: list[str] = field(default_factory=list)

    side: Side = "device"
    link: object = "the other side's"
    egress: Egress = field(default_factory=Egress)

    def __post_init__(self) -> None:
        self.egress.beside("open", sent=7)

    def embed(self, query: str) -> Vectors | None:
        self._check("embed")
        self.queries.append(query)
        return np.ones((1, 2), np.float32)

    def search(self, query: str, vector: Vectors) -> Sequence[Found]:  # noqa: ARG002
        self._check("search")
        return [found for word, found in self.here.items() if word in query]

    async def search_far(self, query: str) -> Sequence[Found]:
        self._check("search_far")
        self.told_far.append(query)
        return [found for word, found in self.far.items() if word in query]

    def rerank(self, query: str, texts: Sequence[str]) -> Sequence[float]:  # noqa: ARG002
        self._check("rerank")
        return [float(len(text)) for text in texts]

    def _check(self, name: str) -> None:
        if name in self.faults:
            raise PacelineError(f"{name} is broken")


@dataclass
class ScriptedText:
    """A generation of given pieces. hold: it never ends by itself."""

    pieces: Sequence[str]
    hold: bool = False
    fault: asyncio.Event | None = None  # it fails once this is set
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> AsyncGenerator[GenerateEvent]:
        try:
            for piece in self.pieces:
                yield TextDelta(piece, 1)
            if self.hold:
                await (self.fault or asyncio.Event()).wait()
                raise PacelineError("the other side has not come back")
            stats = {"cached_tokens": 0.0}
            yield GenerationResult("stop", 5, len(self.pieces), "autoregressive", "asked.", stats=stats)
        finally:
            self.closed.set()

    async def aclose(self) -> None:
        self.closed.set()


@dataclass
class Models:
    """What each agent writes, told apart by a word of its instructions; the answer is anything else."""

    rewrite: Sequence[str] = ("Which broom hides the key?\n",)
    plan: Sequence[str] = ("key in the hall\n",)
    look: Sequence[str] = ("NONE",)
    refine: Sequence[str] = ("NOTHING",)
    answer: Sequence[str] = ("In ", "the hall.")
    hold: str = ""  # the text that does not end
    fault: str = ""  # the text that cannot be begun
    holding: asyncio.Event = field(default_factory=asyncio.Event)  # it has been begun
    asked: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    texts: list[ScriptedText] = field(default_factory=list)

    async def admit(self, request: GenerateRequest) -> Generation:
        system = request.prompt.messages[0]["content"]
        kind = next((kind for words, kind in INSTRUCTIONS.items() if words in system), "answer")
        kind = "read" if kind == "answer" and request.output.max_tokens == 1 else kind
        self.asked.append((kind, request))
        if kind == self.fault:
            raise RequestError("There is no room for it.", status=429)
        if kind == self.hold:
            self.holding.set()
        text = ScriptedText(getattr(self, kind, ()), hold=kind == self.hold)
        self.texts.append(text)
        return text

    def of(self, kind: str) -> list[GenerateRequest]:
        return [request for asked, request in self.asked if asked == kind]


async def answered(
    places: ScriptedPlaces, models: Models, request: GenerateRequest = ASKED, *, apart: bool = True
) -> tuple[str, GenerationResult]:
    driver = WorkflowDriver(UnitRegistry("device"))
    text, done = await collect(WorkflowRun(request, places, driver, models.admit, apart=apart))
    await driver.close()
    assert all(text.closed.is_set() for text in models.texts)
    return text, done


async def test_a_sub_question_finds_what_the_question_does_not() -> None:
    places = ScriptedPlaces({"key": KEY, "broom": BROOM}, {"broom": MAP})
    models = Models(refine=("The broom is in the hall [1][2].\n",))
    text, done = await answered(places, models)
    assert text == "In the hall."
    assert sorted(places.told_far) == ["Where is the key?", "Which broom hides the key?"]
    (asked,) = models.of("answer")
    assert asked.sources.passages is not None
    assert sorted(found.document for found in asked.sources.passages) == ["keys.md", "rooms.md"]
    assert [found.document for found in asked.sources.other_passages] == ["map.md"]
    assert (asked.prompt.messages, asked.wish.sampling, asked.sources.workflow) == (
        ASKED.prompt.messages,
        ASKED.wish.sampling,
        None,
    )
    assert {step.stage for step in done.steps} >= {"rewrite", "search", "search far", "rerank", "refine"}
    assert done.degraded is None
    assert (done.stats["lookups"], done.stats["sent_open_bytes"]) == (2, 7.0)


async def test_passages_are_read_while_the_workflow_goes_on_and_the_last_ones_with_the_answer() -> None:
    """Both passages of the question, since its rewriting waits until they are read; then the sub-question's."""
    models = Models(rewrite=("Which key is on the map?\n",))
    places = ScriptedPlaces({"key": KEY, "map": BROOM}, {"key": MAP})
    admit, read = models.admit, asyncio.Event()

    async def listening(request: GenerateRequest) -> Any:
        if "Split the question" in request.prompt.messages[0]["content"]:
            await read.wait()
        text = await admit(request)
        if models.of("read"):
            read.set()
        return text

    models.admit = listening  # type: ignore[method-assign]
    await answered(places, models)
    (first,) = models.of("read")
    assert first.sources.passages is not None
    passages = (*first.sources.passages, *first.sources.other_passages)
    assert [found.document for found in passages] == ["keys.md", "map.md"]
    (asked,) = models.of("answer")
    assert {found.document for found in asked.sources.passages or ()} == {"keys.md", "rooms.md"}


async def test_passages_of_one_context_are_read_with_the_answer_alone() -> None:
    """Rows of one depend on the passages before it, which are not known yet."""
    models = Models(rewrite=("Which key is on the map?\n",))
    await answered(ScriptedPlaces({"key": KEY, "map": BROOM}, {"key": MAP}), models, apart=False)
    assert not models.of("read") and models.of("answer")


@pytest.mark.parametrize("stage", ["embed", "search", "search_far", "rerank"])
async def test_a_stage_that_fails_is_left_out_and_named(stage: str) -> None:
    places = ScriptedPlaces({"key": KEY}, {"key": MAP}, faults=frozenset({stage}))
    text, done = await answered(places, Models())
    assert text == "In the hall."
    assert done.degraded == "workflow_incomplete"
    assert any(step.state == "failed" and "broken" in step.text for step in done.steps)


@pytest.mark.parametrize("agent", ["rewrite", "refine"])
async def test_an_agent_that_cannot_write_is_left_out_and_named(agent: str) -> None:
    models = Models(fault=agent)
    text, done = await answered(ScriptedPlaces({"key": KEY}), models)
    assert text == "In the hall."
    assert f"left out: {agent}" in done.strategy_reason
    (asked,) = models.of("answer")
    assert [found.text for found in asked.sources.passages or ()] == [KEY.passage.text]


async def test_an_agent_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.workflows.agent_text.STAGE_S", 0.05)
    text, done = await answered(ScriptedPlaces({"key": KEY}), Models(rewrite=("Where",), hold="rewrite"))
    assert text == "In the hall."
    assert "left out: rewrite" in done.strategy_reason


async def test_an_answer_that_fails_after_it_stood_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.workflows.run.LANE_S", 0.01)
    models, driver = Models(hold="answer"), WorkflowDriver(UnitRegistry("device"))
    run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, models.admit)
    reading = asyncio.create_task(collect(run))
    await models.holding.wait()
    fault = models.texts[-1].fault = asyncio.Event()
    while driver._running:
        await asyncio.sleep(0)  # until its lane is free
    fault.set()
    with pytest.raises(PacelineError, match="not come back"):
        await reading
    await driver.close()


@pytest.mark.parametrize("hold", ["rewrite", "refine", "answer"])
async def test_a_client_that_leaves_stops_every_stage(hold: str) -> None:
    models = Models(hold=hold)
    driver = WorkflowDriver(UnitRegistry("device"))
    run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, models.admit)
    reading = asyncio.create_task(collect(run))
    await models.holding.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert all(text.closed.is_set() for text in models.texts)
    began = len(models.asked)
    await driver.close()
    assert len(models.asked) == began  # nothing was begun after


async def test_answers_that_stand_still_keep_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are lanes."""
    monkeypatch.setattr("paceline.runtime.workflows.run.LANE_S", 0.02)
    driver = WorkflowDriver(UnitRegistry("device"))
    held: list[asyncio.Task[tuple[str, GenerationResult]]] = []
    for _ in range(LANES + 1):
        models = Models(hold="answer")
        run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, models.admit)
        held.append(asyncio.create_task(collect(run)))
        await models.holding.wait()
    run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, Models().admit)
    await collect(run)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await driver.close()


@pytest.mark.parametrize("workflow", ["fast", "advanced"])
async def test_a_node_writes_its_usual_answer_after_a_workflow_that_finds_nothing(workflow: Any) -> None:
    async with nodes() as (bench, _):
        plain, _ = await collect(await bench.cloud.prepare(REQUEST))
        text, done = await collect(await bench.cloud.prepare(changed(REQUEST, workflow=workflow)))
        assert text == plain
        assert done.strategy == "aggregate" and f"workflow {workflow}" in done.strategy_reason


@pytest.mark.parametrize(("privacy", "is_asked"), [("local-only", False), ("answer-private", True)])
async def test_a_device_asks_its_cloud_as_the_level_allows(privacy: Any, is_asked: bool) -> None:
    async with nodes() as (bench, _):
        asked = changed(REQUEST, workflow="fast", privacy=privacy, strategy="auto")
        _, done = await collect(await bench.device.prepare(asked))
        assert ("search far" in {step.stage for step in done.steps}) == is_asked
        assert (done.stats.get("sent_open_bytes", 0.0) > 0) == is_asked


async def test_the_engine_is_told_how_much_of_a_workflow_waits_for_each_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rewriting, which every sub-question waits for, is more critical than the answer that follows all of them."""
    asked: list[GenerateRequest] = []
    async with nodes() as (bench, _):
        node = bench.device

        def listening(admit: Admit) -> Admit:
            async def heard(request: GenerateRequest) -> Any:
                asked.append(request)
                return await admit(request)

            return heard

        begin = node._preparation.begin
        node._workflows._admit = listening(node._workflows._admit)

        async def beginning(request: GenerateRequest) -> tuple[GenerateRequest, Admit]:
            held, answer = await begin(request)
            return held, listening(answer)

        monkeypatch.setattr(node._preparation, "begin", beginning)
        for _ in range(2):  # in the second one, the seconds of every stage are known
            asked.clear()
            await collect(await node.prepare(changed(ASKED, privacy="answer-private")))  # no text goes to the cloud
    assert len(asked) >= 2 and asked[0].account.criticality > asked[-1].account.criticality > 0.0


# ---- who leaves or is refused gives units back ----------------------------------------------------------------------
async def test_refused_answers_hold_no_lane() -> None:
    """More of them than there are lanes, then one that is written."""
    driver = WorkflowDriver(UnitRegistry("device"))
    for _ in range(6):
        run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, Models(fault="answer").admit)
        with pytest.raises(RequestError, match="no room"):
            await collect(run)
    run = WorkflowRun(ASKED, ScriptedPlaces({"key": KEY}), driver, Models().admit)
    async with asyncio.timeout(30):
        await collect(run)
    await driver.close()


async def test_a_launch_that_is_cancelled_before_its_first_step_gives_its_unit_back() -> None:
    driver = WorkflowDriver(UnitRegistry("device", NodeUnits(lanes=1)))
    launched: list[int] = []

    async def work(launch: Launch) -> Outcome:
        launched.append(launch.id)
        return Outcome(finished=True)

    def begun() -> list[Stage]:
        stages = WorkflowStages(FLOWS["advanced"], WorkflowSizes(question=4, chunks=4)).begin()
        for stage in stages:
            stage.run = work
        return stages

    for _ in range(2):
        stages = begun()
        driver.begin(stages[0].request, stages, lambda _: None)
        driver.cancel(stages[0].request)
    assert not launched
    ended = asyncio.Event()
    stages = begun()
    driver.begin(stages[0].request, stages, lambda _: ended.set())
    async with asyncio.timeout(30):
        await ended.wait()
    await driver.close()


async def test_a_workflow_ends_with_the_program() -> None:
    driver, models = WorkflowDriver(UnitRegistry("device")), Models(hold="rewrite")
    reading = asyncio.create_task(collect(WorkflowRun(ASKED, ScriptedPlaces(), driver, models.admit)))
    await models.holding.wait()
    await driver.close()
    with pytest.raises(PacelineError, match="shutting down"):
        async with asyncio.timeout(30):
            await reading


async def test_a_workflow_that_waits_takes_a_place_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 1)
    async with nodes(linked=False) as (bench, _):
        asked = changed(REQUEST, workflow="fast", strategy="auto")
        waiting = await bench.device.prepare(asked)
        with pytest.raises(RequestError, match="of 1 at most"):
            await bench.device.prepare(asked)
        await waiting.aclose()
        await waiting.aclose()
        _, done = await collect(await bench.device.prepare(asked))
        assert done.degraded is None
        await (await bench.device.prepare(asked)).aclose()


@pytest.mark.parametrize("workflow", ["fast", "advanced"])
async def test_an_answer_that_was_read_to_its_end_has_no_place(workflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 1)
    async with nodes(linked=False) as (bench, _):
        for _ in range(2):
            answer = await bench.device.prepare(changed(REQUEST, workflow=workflow, strategy="auto", max_tokens=4))
            watch = Observer(lambda: "org/model").answer({})
            async with GenerationFanIn([answer], [watch], set()) as events:
                async for _, event in events.all():
                    if isinstance(event, GenerationResult):
                        break  # as a surface leaves: at once


async def test_a_workflow_that_is_not_begun_has_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ANSWERS", 1)
    with stores_of(tmp_path, {"device": {"keys.md": "The key is under the broom."}}) as stores:
        async with nodes(linked=False, stores=stores) as (bench, _):
            asked, begun = changed(REQUEST, workflow="long", strategy="auto"), asyncio.Event()
            with monkeypatch.context() as patch:
                patch.setattr(stores["device"], "outline", Mock(side_effect=StorageError("the disk is full")))
                with pytest.raises(StorageError):
                    await bench.device.prepare(asked)
            outline = stores["device"].outline
            held, going = threading.Event(), asyncio.get_running_loop()

            def slow(*given: Any) -> Any:
                going.call_soon_threadsafe(begun.set)
                held.wait(30)
                return outline(*given)

            with monkeypatch.context() as patch:
                patch.setattr(stores["device"], "outline", slow)
                preparing = asyncio.create_task(bench.device.prepare(asked))
                await begun.wait()
                preparing.cancel()
                held.set()
                await asyncio.gather(preparing, return_exceptions=True)
            await (await bench.device.prepare(asked)).aclose()


async def test_a_passage_that_both_sides_have_read_is_cited_once(tmp_path: Path) -> None:
    """The workflow of one side has read the other's, which then joins the answer by it."""
    texts = {"cloud": {"keys.md": "The key is under the broom."}, "device": {"hall.md": "The hall has one broom."}}
    with stores_of(tmp_path, texts) as stores:
        async with nodes(stores=stores) as (bench, _):
            asked = changed(REQUEST, workflow="advanced", strategy="aggregate", privacy="open", max_tokens=24)
            asked = changed(asked, messages=({"role": "user", "content": "Where is the key, and the broom?"},))
            _, done = await collect(await bench.device.prepare(asked))
            cited = [(each.side, each.document) for each in done.citations]
            assert ("cloud", "keys.md") in cited and len(cited) == len(set(cited)), done.strategy_reason
