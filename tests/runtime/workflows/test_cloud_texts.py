"""Agents' texts on the cloud's model, over a link in memory: what goes there, what never does, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.errors import LinkError, PacelineError
from paceline.rag.records import Passage
from paceline.runtime.service import GenerateRequest, GenerationResult
from paceline.runtime.sessions import remote
from paceline.runtime.sessions.driver import Egress
from paceline.runtime.sessions.remote import MAX_TEXTS_OF_ONE, RemoteText, TextServer
from paceline.runtime.units import CLOUD, ENGINE, UnitRegistry
from paceline.runtime.workflows.agent_text import AgentText, CloudUnits
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.lookup import Found, Refining
from paceline.runtime.workflows.run import WorkflowRun
from paceline.wire.codec import decode, encode
from paceline.wire.messages import WRITE, OpenSession, WrittenText
from paceline.workflow.flows import FLOWS, WorkflowSizes, WorkflowStages
from paceline.workflow.graph import Launch
from paceline.workflow.profiles import WINDOW
from tests.requests import changed
from tests.runtime.test_node import Bench, collect, nodes
from tests.runtime.workflows.test_research import RESEARCH, ScriptedWeb
from tests.runtime.workflows.test_run import ASKED, KEY, MAP, Models, ScriptedPlaces
from tests.wire.samples import opening

pytestmark = pytest.mark.anyio

SECRET = Found(Passage("diary.md", 1, "", "The key is with XYZZYVELDA.", 0.6), "device", private=True)
EARLIER = ({"role": "user", "content": "What does my diary say?"}, {"role": "assistant", "content": "It says PLUGHED."})


def eager() -> WorkflowDriver:
    """The cloud writes a hundred times as fast."""
    driver = WorkflowDriver(UnitRegistry("device", web=True, cloud=True))
    for phase in ("prefill", "decode"):
        for _ in range(WINDOW):
            driver.profiles.learn(f"agent/{phase}", CLOUD, 4, 0.01)
            driver.profiles.learn(f"agent/{phase}", ENGINE, 4, 1.0)
    return driver


@dataclass
class Device:
    """The device's end: its workflows, what its own model was asked for, and what it has sent."""

    bench: Bench
    here: Models = field(default_factory=Models)
    there: Models = field(default_factory=Models)
    driver: WorkflowDriver = field(default_factory=eager)

    def __post_init__(self) -> None:
        self.units = CloudUnits(self.driver)
        self.units._link = None if self.bench.links is None else self.bench.links[0]
        self.units._forgets = float("inf")  # what it takes is known
        self.bench.cloud._peers._texts = TextServer(self.there.admit)
        assert self.bench.pipes_in_use is not None
        self.frames = self.bench.pipes_in_use[0].sent

    def run(self, request: GenerateRequest, places: ScriptedPlaces, web: ScriptedWeb | None = None) -> WorkflowRun:
        link = None if self.bench.links is None else self.bench.links[0]
        cloud = self.units.texts(link, request.wish.privacy, lambda: b"0" * 16)
        return WorkflowRun(request, places, self.driver, self.here.admit, web=web, cloud=cloud)

    async def answer(
        self, request: GenerateRequest, places: ScriptedPlaces | None = None, web: ScriptedWeb | None = None
    ) -> GenerationResult:
        return (await collect(self.run(request, places or ScriptedPlaces({"key": KEY}), web)))[1]

    def openings(self) -> list[OpenSession]:
        found = [decode(frame) for frame in self.frames]
        return [message for message in found if isinstance(message, OpenSession)]


class FarAndNear(ScriptedPlaces):
    """The same passages of each side, whatever is asked."""

    def __init__(self, near: list[Found], far: list[Found]) -> None:
        super().__init__()
        self._near, self._far = near, far

    def search(self, query: str, vector: Any) -> list[Found]:  # noqa: ARG002
        return self._near

    async def search_far(self, query: str) -> list[Found]:  # noqa: ARG002
        return self._far


@asynccontextmanager
async def device(**models: Models) -> AsyncIterator[Device]:
    async with nodes() as (bench, _):
        made = Device(bench, **models)
        yield made
        await made.driver.close()
        assert all(text.closed.is_set() for text in (*made.here.texts, *made.there.texts))


def units(done: GenerationResult, stage: str) -> set[str]:
    return {step.unit.split()[0] for step in done.steps if step.stage == stage}


async def test_what_reads_nothing_private_is_written_by_the_cloud_and_the_answer_is_the_same() -> None:
    places, web = ScriptedPlaces({"key": KEY, "broom": KEY}, {"broom": MAP}), ScriptedWeb()
    async with device() as made:
        done = await made.answer(RESEARCH, places, web)
        assert {kind for kind, _ in made.there.asked} == {"rewrite", "plan", "refine", "look"}
        assert units(done, "rewrite") == units(done, "plan") == units(done, "look") == {CLOUD}
        assert units(done, "refine") == {ENGINE}  # of the device's documents
        assert units(done, "refine public") == {CLOUD}  # of the page, and of the cloud's documents
        assert done.degraded is None and web.queries == ["key in the hall"]
        assert done.stats["sent_open_bytes"] > 500.0
        (away,) = made.here.of("answer")
    async with device() as made:
        await made.answer(changed(RESEARCH, privacy="answer-private"), places, ScriptedWeb())
        (alone,) = made.here.of("answer")
    assert sorted(away.sources.passages or (), key=str) == sorted(alone.sources.passages or (), key=str)


async def test_no_frame_has_a_word_of_a_private_document_or_of_an_earlier_answer() -> None:
    places = ScriptedPlaces({"key": SECRET, "broom": SECRET}, {"broom": MAP})
    async with device() as made:
        asked = changed(RESEARCH, messages=(*EARLIER, *RESEARCH.prompt.messages))
        await made.answer(asked, places, ScriptedWeb())
        assert made.here.of("refine") and "XYZZYVELDA" in str(made.here.of("refine"))
        assert len(made.openings()) >= 4 and all(opening.strategy == WRITE for opening in made.openings())
        sent = b"".join(made.frames)
        assert b"Where is the key?" in sent and b"XYZZYVELDA" not in sent and b"PLUGHED" not in sent


LONG = Found(
    Passage("east.md", -1, "", "The hall with the key is in the east of the old town.", 0.5), "cloud", private=False
)
SHORT = Found(Passage("west.md", -1, "", "The key is old.", 0.5), "cloud", private=False)
HERE_TOO = Found(
    Passage("diary.md", 2, "", "The key with the red mark lies below the broom in the hall.", 0.5), "device", True
)

BETTER = [HERE_TOO, replace(HERE_TOO, passage=Passage("diary.md", 3, "", f"{HERE_TOO.passage.text} So it does.", 0.5))]


def texts_read(made: Device) -> list[str]:
    """Of the passages of the answer."""
    (asked,) = made.here.of("answer")
    return sorted(passage.text for passage in (*(asked.sources.passages or ()), *asked.sources.other_passages))


async def test_each_zone_is_refined_in_a_text_of_its_own_and_the_answer_reads_the_best_of_both() -> None:
    """The longer passages are the better ones; two are read."""
    here = Models(rewrite=("NONE",), refine=("The key lies below the broom [1].",))
    there = Models(rewrite=("NONE",), refine=("The hall is in the east [1].\nThe key is old [2].",))
    async with device(here=here, there=there) as made:
        done = await made.answer(ASKED, FarAndNear([SECRET, HERE_TOO], [SHORT, LONG]))
        assert (units(done, "refine"), units(done, "refine public")) == ({ENGINE}, {CLOUD})
        assert texts_read(made) == ["The hall is in the east.", "The key lies below the broom."]
        (private,), (public,) = here.of("refine"), there.of("refine")
        for text, own, others in ((private, HERE_TOO, LONG), (public, LONG, HERE_TOO)):
            prompt = str(text.prompt.messages)
            assert own.passage.text in prompt and others.passage.text not in prompt
        assert private.output.max_tokens is not None and public.output.max_tokens is not None
        assert private.output.max_tokens < public.output.max_tokens  # it reads one passage, the other two


@pytest.mark.parametrize("near", [[], [SECRET], BETTER])
async def test_what_is_sent_is_the_same_whatever_the_private_documents_hold(near: list[Found]) -> None:
    """Also where none of the cloud's passages is among the best."""
    there = Models(rewrite=("NONE",), refine=("The hall is in the east [1].\nThe key is old [2].",))
    async with device(there=there) as made:
        done = await made.answer(ASKED, FarAndNear(near, [SHORT, LONG]))
        assert done.degraded is None
        sent = [str(opening.messages) for opening in made.openings()]
        assert len(sent) == 2 and sum(LONG.passage.text in each and SHORT.passage.text in each for each in sent) == 1
        best = sorted([*near, SHORT, LONG], key=lambda found: -len(found.passage.text))[:2]
        wanted = {LONG: "The hall is in the east.", SHORT: "The key is old."}
        assert texts_read(made) == sorted(wanted.get(found, found.passage.text) for found in best)


async def test_a_public_text_that_the_cloud_does_not_write_is_written_here_if_it_is_read() -> None:
    there = Models(rewrite=("NONE",), fault="refine")
    for near, texts in ([], 1), (BETTER, 1), ([HERE_TOO], 2):
        here = Models(rewrite=("NONE",))
        async with device(here=here, there=there) as made:
            done = await made.answer(ASKED, FarAndNear(list(near), [SHORT, LONG]))
            assert done.degraded is None
            assert len(here.of("refine")) == texts


async def test_a_device_alone_refines_the_passages_of_both_sides_in_one_text() -> None:
    async with device(here=Models(rewrite=("NONE",))) as made:
        await made.answer(changed(ASKED, privacy="answer-private"), FarAndNear([HERE_TOO], [LONG]))
        (refined,) = made.here.of("refine")
        assert all(found.passage.text in str(refined.prompt.messages) for found in (LONG, HERE_TOO))


@pytest.mark.parametrize("privacy", ["answer-private", "local-only"])
async def test_levels_that_keep_texts_here_keep_them_here(privacy: Any) -> None:
    async with device() as made:
        done = await made.answer(changed(ASKED, privacy=privacy))
        assert not made.openings() and not made.there.asked
        assert units(done, "rewrite") == {ENGINE}


async def test_a_prompt_with_private_text_is_not_sent_even_where_a_launch_says_so() -> None:
    rested: list[str] = []

    class Written:
        """The cloud, which must not be asked."""

        units = SimpleNamespace(rest=rested.append, names=("cloud 0",))

        def begin(self, *_: object) -> Any:
            raise AssertionError("it was sent")

    refining = Refining("Where?")
    refining.begin([SECRET])
    flow = WorkflowStages(FLOWS["advanced"], WorkflowSizes(question=4, chunks=4))
    flow.begin()
    stages = flow.rewrite
    assert stages is not None
    AgentText(stages, refining, None, None, Written())  # type: ignore[arg-type]
    await stages.read.run(Launch(1, stages.read, "cloud 0", 1, 0, 1))
    assert len(rested) == 1 and "private" in rested[0]


@pytest.mark.parametrize("fault", ["refused", "mute", "lost", "nonsense"])
async def test_what_the_cloud_does_not_write_is_written_here_and_nothing_is_missing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.3)
    there = {
        "refused": Models(fault="rewrite"),
        "mute": Models(hold="rewrite", rewrite=()),
        "lost": Models(hold="rewrite", rewrite=("Which ",)),
        "nonsense": Models(rewrite=("word " * 10_000,)),
    }[fault]
    async with device(there=there) as made:
        answering = asyncio.create_task(made.answer(ASKED))
        if fault == "lost":
            await there.holding.wait()
            await made.bench.unlink()
        done = await answering
        assert done.degraded is None
        assert units(done, "rewrite") == {ENGINE} and made.here.of("rewrite")
        began = len(made.there.asked)
        done = await made.answer(ASKED)  # the cloud rests
        assert len(made.there.asked) == began and units(done, "rewrite") == {ENGINE}


async def test_sub_questions_that_the_cloud_has_written_before_it_was_lost_are_searched_for_once() -> None:
    there = Models(rewrite=("Which ", "broom ", "hides ", "the ", "key?", "\n", "Who ", "hides "), hold="rewrite")
    places = ScriptedPlaces({"key": KEY})
    async with device(there=there) as made:
        answering = asyncio.create_task(made.answer(ASKED, places))
        while places.queries.count("Which broom hides the key?") < 1:
            await asyncio.sleep(0.01)
        assert not made.here.of("rewrite")
        await made.bench.unlink()
        assert (await answering).degraded is None and made.here.of("rewrite")
    assert sorted(places.queries) == ["Where is the key?", "Which broom hides the key?"]


async def test_a_client_that_leaves_ends_the_text_at_the_cloud() -> None:
    there = Models(hold="rewrite", rewrite=("Which ",))
    async with device(there=there) as made:
        reading = asyncio.create_task(collect(made.run(ASKED, ScriptedPlaces({"key": KEY}))))
        await there.holding.wait()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(5):
            await there.texts[0].closed.wait()


async def test_a_real_cloud_writes_a_text_as_it_would_for_its_own_client() -> None:
    """`nodes` asserts that no sequence has rows at the end."""
    async with nodes() as (bench, _):
        messages = [{"role": "user", "content": "Where is the key?"}]
        assert bench.links is not None
        egress = Egress()
        text, done = await collect(RemoteText(bench.links[0], messages, 12, "document-private", b"", egress))
        plain = changed(ASKED, workflow=None, strategy="autoregressive", documents=0, max_tokens=12, steps=False)
        greedy = changed(plain, sampling=replace(plain.wish.sampling, temperature=0.0))
        assert text == (await collect(await bench.cloud.prepare(greedy)))[0]
        assert (done.completion_tokens, done.reason) == (12, "length")
        assert egress.kinds()["open"] > 100


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_tokens": 513}, "1 to 512 tokens"),
        ({"max_tokens": 0}, "1 to 512 tokens"),
        ({"privacy": "local-only"}, "no text"),
        ({"privacy": "answer-private"}, "no text"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "maximum context"),
    ],
)
async def test_a_cloud_refuses_what_no_workflow_asks_for(change: dict[str, Any], why: str) -> None:
    async with nodes() as (bench, _):
        assert bench.links is not None
        given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "privacy": "open"} | change
        text = RemoteText(bench.links[0], cache_key=b"", egress=Egress(), **given)
        with pytest.raises(LinkError, match=why):
            await collect(text)


async def test_one_device_has_so_many_texts_at_once_and_another_still_has_its_own() -> None:
    class Heard:
        """The cloud's end of a link."""

        def __init__(self) -> None:
            self.sent: list[Any] = []

        def send(self, message: Any) -> int:
            self.sent.append(message)
            return len(encode(message))

        def attach(self, session: int, handler: object) -> None: ...

    models = Models(hold="answer", answer=())
    server, busy, other = TextServer(models.admit), Heard(), Heard()
    for number in range(MAX_TEXTS_OF_ONE):
        server.open(busy, "laptop", asking(2 * number + 1))  # type: ignore[arg-type]
    assert not busy.sent
    server.open(busy, "laptop", asking(1))  # type: ignore[arg-type]
    assert [message.reason for message in busy.sent] == ["refused: it is busy"]
    server.open(other, "phone", asking(1))  # type: ignore[arg-type]
    assert not other.sent
    await server.close()
    assert all(text.closed.is_set() for text in models.texts)


def asking(session: int) -> OpenSession:
    a_text = {"strategy": WRITE, "max_tokens": 4, "targets": [], "constraint": None, "top_k_documents": 0}
    return msgspec.structs.replace(opening(session), **a_text, privacy="open")


async def test_a_cloud_that_writes_without_end_is_stopped() -> None:
    class Flooding:
        """The device's end of a link whose cloud sends a text of any length."""

        rtt = None
        closed = asyncio.Event()

        def open_session(self, handler: Any) -> int:
            self.handler = handler
            return 1

        def send(self, message: Any) -> int:  # noqa: ARG002
            for _ in range(100):
                self.handler(WrittenText(1, "word " * 100, 0))
            return 1

        def detach(self, session: int) -> int:  # noqa: ARG002
            return 0

        def listen(self) -> float:
            return 0.0

    text = RemoteText(Flooding(), [{"role": "user", "content": "Hi"}], 4, "open", b"", Egress())  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match=r"more than it was asked for|too many messages"):
        await collect(text)
