"""Long questions on a node: each passage is read by a job, at home, once; who leaves stops all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.rag.records import Passage, Vectors
from paceline.runtime.questions import separated
from paceline.runtime.service import GenerateRequest, Generation, GenerationResult
from paceline.runtime.units import UnitRegistry
from paceline.runtime.workflows.driver import WorkflowDriver
from paceline.runtime.workflows.long import READ, LongTerms
from paceline.runtime.workflows.lookup import Claims, Found
from paceline.runtime.workflows.run import WorkflowRun
from paceline.workflow.jobs import SUMMARY_TOKENS
from tests.requests import changed
from tests.runtime.test_node import collect
from tests.runtime.workflows.test_cloud_texts import device
from tests.runtime.workflows.test_run import ASKED, MAP, Models, ScriptedPlaces, ScriptedText

pytestmark = pytest.mark.anyio

LONG = changed(ASKED, workflow="long")
TERMS = LongTerms(passages=6, fingerprint="model")
TEXTS = (
    "The gate is green.",
    "A key hangs in the mill, says XYZZYVELDA.",
    "The key is in the barn.",
    "Nobody has seen the broom.",
)


def found(place: int, text: str, document: str = "town.md") -> Found:
    return Found(Passage(document, place + 1, "", text, 0.9 - place / 100, file_id=document), "device", private=True)


@dataclass
class Folder(ScriptedPlaces):
    """Passages of one document, the best first, and what was said of them."""

    texts: Sequence[str] = TEXTS
    kept: dict[tuple[int, str], str] = field(default_factory=dict)
    min_score: float = 0.25

    def search(self, query: str, vector: Vectors, most: int = 8) -> Sequence[Found]:
        super().search(query, vector)
        return [found(place, text) for place, text in enumerate(self.texts[:most])]

    def whole(self, query: str) -> Sequence[Found]:  # noqa: ARG002
        return [found(place, text) for place, text in enumerate(self.texts)]

    def around(self, each: Found, count: int) -> Sequence[Found]:
        place = each.passage.chunk_id - 1
        first, last = max(0, place - count), min(len(self.texts), place + count + 1)
        return [found(near, self.texts[near]) for near in range(first, last)]

    def reading(self, each: Found, asked: str) -> str | None:
        return self.kept.get((each.passage.chunk_id, asked))

    def keep_reading(self, each: Found, asked: str, owner: str, text: str) -> None:  # noqa: ARG002
        self.kept[each.passage.chunk_id, asked] = text


@dataclass
class Readers(Models):
    """Jobs reply what `said` has of the first of its texts that stands in what they read."""

    rewrite: Sequence[str] = ("NONE",)
    said: Mapping[str, str] = field(default_factory=dict)
    summary: str = "The gate is green."
    broken: str = ""  # a text whose job cannot be begun

    async def admit(self, request: GenerateRequest) -> Generation:
        passages = (*(request.sources.passages or ()), *request.sources.other_passages)
        limit = request.output.max_tokens
        if not passages or limit not in (32, SUMMARY_TOKENS):
            return await super().admit(request)
        self.asked.append(("job", request))
        text = passages[0].text
        if self.broken and self.broken in text:
            raise RequestError("There is no room for it.", status=429)
        if self.hold == "job":
            self.holding.set()
        reply = (
            self.summary if limit == SUMMARY_TOKENS else next((r for t, r in self.said.items() if t in text), "NONE")
        )
        self.texts.append(ScriptedText((reply,), hold=self.hold == "job"))
        return self.texts[-1]

    def read(self) -> list[str]:
        """What jobs have read."""
        sources = (request.sources for request in self.of("job"))
        return [(*(each.passages or ()), *each.other_passages)[0].text for each in sources]


async def answered(
    places: Folder, models: Readers, request: GenerateRequest = LONG, terms: LongTerms = TERMS
) -> tuple[list[str], GenerationResult]:
    """What the answer reads, and how it ends."""
    driver = WorkflowDriver(UnitRegistry("device"))
    _, done = await collect(WorkflowRun(request, places, driver, models.admit, terms=terms))
    await driver.close()
    assert all(text.closed.is_set() for text in models.texts)
    (asked,) = models.of("answer")[-1:]
    return [each.text for each in (*(asked.sources.passages or ()), *asked.sources.other_passages)], done


async def test_the_answer_reads_the_passages_that_hold_one_and_cites_them_as_they_are() -> None:
    models = Readers(said={TEXTS[2]: "in the barn", TEXTS[1]: "NONE"})
    read, done = await answered(Folder(), models)
    assert sorted(models.read()) == sorted(TEXTS)
    assert read == [TEXTS[2], TEXTS[0]]  # and the best one of the search
    (asked,) = models.of("answer")
    assert {each.chunk_id for each in asked.sources.passages or ()} == {1, 3} and asked.sources.workflow is None
    told = [step for step in done.steps if step.stage == "jobs"]
    assert told[-1].text == "4 of 4 passages read; 1 hold an answer to 'Where is the key?'"
    assert done.degraded is None and not any("barn" in step.text for step in done.steps)


async def test_what_is_made_up_is_dropped() -> None:
    read, _ = await answered(Folder(), Readers(said={text: "in the 17 towers of Oz" for text in TEXTS}))
    assert read == [*TEXTS[:2]]


async def test_passages_that_disagree_are_read_again_with_what_stands_around_them() -> None:
    both = {TEXTS[1]: "in the mill", TEXTS[2]: "in the barn"}
    models = Readers(said={f"{TEXTS[0]}\n{TEXTS[1]}": "NONE", f"{TEXTS[1]}\n{TEXTS[2]}": "in the barn", **both})
    read, _ = await answered(Folder(), models)
    wider = [text for text in models.read() if "\n" in text]
    assert wider == ["\n".join(TEXTS[0:3]), "\n".join(TEXTS[1:4])]
    assert read == [TEXTS[2], TEXTS[0]]  # the mill was not said again


async def test_a_question_that_is_asked_again_has_nothing_read_again() -> None:
    places = Folder()
    first = Readers(said={TEXTS[2]: "in the barn"})
    once, done = await answered(places, first)
    again = Readers()
    read, then = await answered(places, again)
    assert (read, again.read()) == (once, []) and then.stats["agent_tokens"] < done.stats["agent_tokens"]
    for other in (changed(LONG, owner="ben"), LONG):  # nobody else's, and no other model's
        asked = Readers()
        terms = TERMS if other is not LONG else replace(TERMS, fingerprint="another")
        await answered(places, asked, other, terms)
        assert len(asked.read()) == len(TEXTS)


async def test_sub_questions_are_read_for_too_and_each_has_its_passages() -> None:
    models = Readers(rewrite=("Who hides the key?\n",), said={TEXTS[2]: "in the barn"})
    read, done = await answered(Folder(), models)
    assert len(models.read()) == 4 + 3 and done.stats["lookups"] == 2  # half as many
    assert TEXTS[2] in read and len(read) <= READ


async def test_each_part_of_a_question_is_read_for_and_answered_from_its_own_passages() -> None:
    asked = changed(LONG, messages=({"role": "user", "content": "Where is the key, and who has seen the broom?"},))
    tokenizer: Any = SimpleNamespace(thinking=None, one_document=False)
    models = Readers(said={TEXTS[2]: "in the barn", TEXTS[3]: "nobody has seen"})
    terms = replace(TERMS, passages=8, parts=partial(separated, tokenizer=tokenizer, max_tokens=None))
    _, done = await answered(Folder(), models, asked, terms)
    questions = [request.prompt.messages[-1]["content"].splitlines()[0] for request in models.of("job")]
    assert set(questions) == {"Where is the key?", "Who has seen the broom?"}
    answers = {each.prompt.messages[-1]["content"]: each.sources.passages or () for each in models.of("answer")}
    assert next(found.text for found in answers["Where is the key?"]) == TEXTS[2]
    assert next(found.text for found in answers["Who has seen the broom?"]) == TEXTS[3]
    assert "each part of the question is answered in turn" in done.strategy_reason


async def test_a_passage_that_cannot_be_read_is_left_out_and_said() -> None:
    models = Readers(said={TEXTS[2]: "in the barn"}, broken=TEXTS[0])
    read, done = await answered(Folder(), models)
    assert TEXTS[2] in read
    assert done.degraded == "workflow_incomplete" and "left out: jobs" in done.strategy_reason
    assert any("1 could not be" in step.text for step in done.steps)


async def test_the_far_side_s_passages_are_read_here_too() -> None:
    places = Folder(far={"key": MAP}, texts=TEXTS[:1])
    models = Readers(said={MAP.passage.text: "in the east"})
    read, _ = await answered(places, models)
    assert sorted(models.read()) == sorted([TEXTS[0], MAP.passage.text]) and MAP.passage.text in read


@pytest.mark.parametrize("titles", [(), ("town.md (4 passages)",)])
async def test_the_plan_hears_titles_only_where_it_was_given_any(titles: tuple[str, ...]) -> None:
    models = Readers()
    await answered(Folder(), models, terms=replace(TERMS, titles=titles))
    (asked,) = models.of("rewrite")
    assert ("town.md" in str(asked.prompt.messages)) == bool(titles)


async def test_a_folder_is_summarised_part_by_part_and_then_in_fewer_texts() -> None:
    texts = [f"Part {number}. The gate is green." + " So it is." * 120 for number in range(20)]
    models = Readers()
    read, done = await answered(
        Folder(texts=texts), models, changed(LONG, messages=({"role": "user", "content": "Summarise this folder."},))
    )
    assert not models.of("rewrite")
    assert 0 < len(read) <= READ and set(read) == {"The gate is green."}
    first = [text for text in models.read() if "Part 0" in text]
    assert first and "Part 1" in first[0] and done.degraded is None


async def test_a_summary_of_many_documents_leaves_none_out() -> None:
    @dataclass
    class Shelf(Folder):
        def whole(self, query: str) -> Sequence[Found]:  # noqa: ARG002
            return [found(place, text, f"{place}.md") for place, text in enumerate(self.texts)]

    asked = changed(LONG, messages=({"role": "user", "content": "Summarise this folder."},))
    read, _ = await answered(Shelf(texts=["The gate is green."] * 19), Readers(), asked, replace(TERMS, passages=48))
    assert len(read) == READ
    assert "\n".join(read).split("\n") == [f"{place}.md: The gate is green." for place in range(19)]


def test_of_passages_that_say_the_same_the_best_is_taken() -> None:
    claims, same = Claims(), [found(place, "The  gate\nis green.", f"{place}.md") for place in range(3)]
    assert claims.take(same) == same[:1] and claims.take(same[1:]) == []


async def test_leaving_stops_every_job_and_frees_the_units() -> None:
    models, driver = Readers(hold="job"), WorkflowDriver(UnitRegistry("device"))
    run = WorkflowRun(LONG, Folder(), driver, models.admit, terms=TERMS)
    reading = asyncio.create_task(collect(run))
    await models.holding.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert all(text.closed.is_set() for text in models.texts)
    began = len(models.asked)
    while driver._running:
        await asyncio.sleep(0)
    again = Readers(said={TEXTS[2]: "in the barn"})
    await collect(WorkflowRun(LONG, Folder(), driver, again.admit, terms=TERMS))
    assert len(models.asked) == began
    await driver.close()


async def test_no_frame_has_a_word_of_a_document_and_jobs_run_at_home() -> None:
    """Where the cloud writes what reads nothing private."""
    said = {TEXTS[1]: "says XYZZYVELDA", TEXTS[2]: "in the barn"}
    async with device(here=Readers(said=said), there=Readers()) as made:
        run: Any = made.run(LONG, Folder())
        run.terms = TERMS
        _, done = await collect(run)
        sent = b"".join(made.frames)
        assert made.there.of("rewrite") and b"Where is the key?" in sent
        assert b"XYZZYVELDA" not in sent and b"town.md" not in sent and b"barn" not in sent
        assert {step.unit.split()[0] for step in done.steps if step.stage.startswith("jobs")} == {"engine"}
        assert done.stats["sent_open_bytes"] > 0
