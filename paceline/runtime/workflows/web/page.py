"""One page of the web, or the snippets of a search without pages: fetched, embedded, and its best passages looked at.

Whatever a page holds or does, the workflow goes on: a page that cannot be read leaves its snippet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.core.side import Side
from paceline.errors import PacelineError
from paceline.rag.prompt import passages_text
from paceline.rag.records import Passage
from paceline.rag.web.fetch import shown
from paceline.rag.web.search import MAX_TITLE, WebResult, one_line
from paceline.runtime.workflows.driver import Outcome, Work
from paceline.runtime.workflows.limits import STAGE_S, within
from paceline.runtime.workflows.lookup import Lookup, Reading
from paceline.runtime.workflows.shortlist import Found
from paceline.runtime.workflows.web.places import WebPlaces
from paceline.workflow.builder import PUBLIC
from paceline.workflow.events import Launch
from paceline.workflow.graph import SubStage, SubStageId

log = logging.getLogger("paceline.workflow")

CANDIDATES: Final = 8  # passages of a page that are reranked, as of a search


@dataclass(slots=True)
class PageLookup:
    """results: one with its page, or several without. lookup: of the stages after embedding. ended: called where the
    page comes to nothing; further sub-stages that are not wanted then."""

    query: str
    results: Sequence[WebResult]
    web: WebPlaces
    run: Reading
    nodes: dict[str, SubStage]
    lookup: Lookup
    ended: Callable[[], Sequence[SubStageId]]
    _passages: list[Passage] = field(default_factory=list)
    _scores: dict[int, float] = field(default_factory=dict)  # by place in `_passages`

    def works(self) -> list[tuple[SubStage, Work]]:
        own: dict[str, Work] = {"fetch": self._fetch, "embed page": self._embed}
        works = [(node, own[stage]) for stage, node in self.nodes.items() if stage in own]
        if "fetch" not in self.nodes:
            self._passages = [_passage(result, result.snippet) for result in self.results if result.snippet]
        return [*works, *self.lookup.works()]

    async def _fetch(self, launch: Launch) -> Outcome:
        (result,) = self.results
        try:
            page = await self.web.read(result.url)
            titled = replace(result, title=one_line(page.title, MAX_TITLE) or result.title)
            self._passages = [_passage(titled, chunk.text, page.url, chunk.title) for chunk in page.passages]
            told, failed = f"{len(self._passages)} passages of {shown(page.url)}", False
        except PacelineError as error:
            told, failed = str(error), True
        except Exception as error:  # a stranger's page may lead to anything
            log.exception("a page could not be read")
            told, failed = f"{shown(result.url)} cannot be read ({type(error).__name__})", True
        if failed and result.snippet:
            self._passages = [_passage(result, result.snippet, result.url, result.title)]
        self.run.note("fetch", launch, told, failed=failed)
        if not self._passages:
            return self._nothing()
        return Outcome(resized=[(self.nodes["embed page"].id, len(self._passages))])

    async def _embed(self, launch: Launch) -> Outcome:
        part = self._passages[launch.first : launch.first + launch.count]
        texts = [passages_text(passage) for passage in part]
        try:
            scoring = self.run.registry.run(launch.unit, lambda: self.web.scores(self.query, texts) if texts else ())
            scores = await within(STAGE_S, scoring)
        except PacelineError as error:
            self.run.note("embed page", launch, f"in the page's own order: {error}", failed=True)
            scores = [self.web.min_score] * len(part)
        self._scores |= dict(enumerate(scores, launch.first))
        if len(self._scores) < len(self._passages):
            return Outcome()
        about = [place for place in self._scores if self._scores[place] >= self.web.min_score]
        best = sorted(about, key=lambda place: (-self._scores[place], place))[:CANDIDATES]
        side: Side = self.web.side
        found = [
            Found(replace(self._passages[place], score=self._scores[place]), side, private=False, web=True)
            for place in best
        ]
        new = self.run.claim(found)
        self.run.note("embed page", launch, f"{len(new)} of {len(self._passages)} passages are about {self.query!r}")
        return self.lookup.take(new, PUBLIC) if new else self._nothing()

    def _nothing(self) -> Outcome:
        """None of its stages is wanted."""
        own = [node.id for stage, node in self.nodes.items() if stage != "fetch"]
        return Outcome(dropped=[*own, *self.ended()])


def _passage(result: WebResult, text: str, url: str = "", title: str = "") -> Passage:
    """A passage of no store. title: before the text."""
    return Passage(result.title or "a page", -1, title, text, 0.0, collection="", url=url)
