"""The three workflows as sub-stages: `fast`, `advanced` and `research` (HeRo, 6.1).

- fast: documents are split, embedded, searched, reranked; the answer is generated from the best passages
- advanced: besides, a small model rewrites the question as sub-questions, each of which is searched for as soon as it
  is written, and passages are refined before they are read
- research: besides, a plan asks for pages of the web, and a second look at what they hold may ask for more

Where documents were split and embedded before, the workflows begin with the search.

Documents are private; the question, its sub-questions and the web are not. The second look reads what came from the web
only, so that nothing of the documents is in a request to the web. Texts are not handled here: only numbers of items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.workflow.graph import Dependency, SubStage, SubStageId
from paceline.workflow.templates import WorkflowTemplate

WorkflowName = Literal["fast", "advanced", "research"]
WORKFLOWS: Final[tuple[WorkflowName, ...]] = ("fast", "advanced", "research")
INSTRUCTIONS: Final = 40  # tokens around what a model reads
NONE: Final = SubStageId(0)
GROUP: Final = 4  # tokens an agent writes before others see them
ANSWER_GROUP: Final = 16  # tokens of an answer in a launch
REFINED: Final = 32  # tokens of refined passages of one search, as expected at first
WRITTEN: Final = 24  # tokens of sub-questions, as expected at first
ANSWER: Final = 24  # tokens, as expected at first


@dataclass(frozen=True, slots=True)
class WorkflowModels:
    """Names of models, as in units and profiles. `host` is what runs without a model: splitting and search."""

    embed: str = "embed"
    rerank: str = "rerank"
    agent: str = "agent"  # rewrites, plans, refines
    chat: str = "chat"
    host: str = "host"
    web: str = "web"
    far: str = "far"  # the other side's documents


@dataclass(frozen=True, slots=True)
class WorkflowSizes:
    """What is known of a request when it comes."""

    question: int  # tokens
    chunks: int  # of the documents
    chunk_tokens: int = 128
    reranked: int = 16  # most passages of a search that are reranked
    kept: int = 3  # of them, those that are read
    chunk_bytes: float = 600.0
    stored: bool = False  # the documents are split and embedded already
    private: bool = True  # the documents are
    far: bool = False  # the other side's documents are searched too
    agents_here: bool = False  # no agent's text is written on another side, whatever it reads


def templates(models: WorkflowModels | None = None) -> dict[str, WorkflowTemplate]:
    """A fresh template of each workflow: what its agents are expected to add."""
    names = models or WorkflowModels()
    agent, chat = names.agent, names.chat
    searched: dict[str, tuple[str, float, dict[str, float]]] = {
        "rewrite.decode": (f"{agent}/decode", WRITTEN, {"embed question": 1.0}),
        "embed question": (f"{names.embed}/encode", 1, {"rerank": 1.0}),
        "rerank": (f"{names.rerank}/score", 8, {"refine.prefill": 1.0}),
        "refine.prefill": (f"{agent}/prefill", 300, {"refine.decode": 1.0}),
        "refine.decode": (f"{agent}/decode", REFINED, {}),
        "answer.decode": (f"{chat}/decode", ANSWER, {}),
    }
    asked: dict[str, tuple[str, float, dict[str, float]]] = {
        "plan.decode": (f"{agent}/decode", WRITTEN, {"fetch": 0.8}),
        "look.decode": (f"{agent}/decode", 8, {"fetch": 0.3}),
        "search web": (f"{names.web}/search", 1, {"fetch": 1.0}),
        "fetch": (f"{names.web}/fetch", 1, {"embed page": 1.0}),
        "embed page": (f"{names.embed}/encode", 6, {"rerank": 1.0}),
    }
    fast = {name: searched[name] for name in ("answer.decode",)}
    return {
        "fast": WorkflowTemplate("fast", fast),
        "advanced": WorkflowTemplate("advanced", searched),
        "research": WorkflowTemplate("research", searched | asked),
    }


@dataclass(slots=True)
class WorkflowBuilder:
    """Sub-stages of one request, to be given to the scheduler as they become known."""

    workflow: WorkflowName
    sizes: WorkflowSizes
    models: WorkflowModels = field(default_factory=WorkflowModels)
    request: int = 0
    owner: str = ""
    ids: Iterator[int] = field(default_factory=lambda: iter(range(1, 1_000_000)))
    answer_prefill: SubStageId = NONE
    answer: SubStageId = NONE  # the sub-stage that writes the answer
    rewrite: SubStageId | None = None  # those that decide, where the workflow has them
    plan: SubStageId | None = None
    look: SubStageId | None = None
    _embedded: SubStageId | None = None
    _look_prefill: SubStageId | None = None
    _texts: int = 0  # that agents have begun
    _read: SubStageId | None = None  # the last prefill of passages: they follow each other in one context

    def begin(self) -> list[SubStage]:
        """What is known from the beginning."""
        names, sizes = self.models, self.sizes
        found: list[SubStage] = [] if sizes.stored else self._embedding()
        last: list[tuple[SubStage, Literal["all"]]] = []
        if self.workflow == "fast":
            found += self._search(None)
            last = [(found[-1], "all")]
            tokens = self._kept_tokens(sizes.chunks) + sizes.question + INSTRUCTIONS
        else:
            last += [(node, "all") for node in found[-1:]]
            rewriting = self._agent("rewrite", sizes.question + INSTRUCTIONS, WRITTEN, decides=True)
            self.rewrite = rewriting[-1].id
            found += rewriting
            last.append((rewriting[-1], "all"))
            tokens = sizes.question + INSTRUCTIONS
        if self.workflow == "research":
            planning = self._agent("plan", sizes.question + INSTRUCTIONS, WRITTEN, decides=True)
            looking = self._agent("look", INSTRUCTIONS + REFINED, 8, [(planning[-1], "all")], decides=True)
            self.plan, self.look, self._look_prefill = planning[-1].id, looking[-1].id, looking[0].id
            found += [*planning, *looking]
            last += [(planning[-1], "all"), (looking[-1], "all")]
        prefill = self._node("answer.prefill", names.chat, "prefill", tokens, last, ordered=True, context="answer")
        answer = self._node(
            "answer.decode",
            names.chat,
            "decode",
            ANSWER,
            [(prefill, "all")],
            ordered=True,
            open_ended=True,
            group=ANSWER_GROUP,
            context="answer",
        )
        self.answer_prefill, self.answer = prefill.id, answer.id
        return [*found, prefill, answer]

    def sub_question(self, *, rewritten: bool = True) -> list[SubStage]:
        """The rewriter has written a sub-question, or (not `rewritten`) the question itself is one: the documents are
        searched for it."""
        found = self._search(self.rewrite if rewritten else None)
        return found + self._refined(found[-1], self.sizes.chunks, look=False)

    def web_request(self, decider: SubStageId, chunks: int) -> list[SubStage]:
        """The plan, or the second look, has asked for a page. chunks: of the page, as expected."""
        return self._page(decider, chunks, fetched=True, look=decider == self.plan)

    def web_search(self, decider: SubStageId) -> SubStage:
        """The plan, or the second look, has written a query: the web is searched for it, and `web_page` may follow.
        What reads the pages waits for it: the second look, or the answer."""
        reader = self._look_prefill if decider == self.plan and self._look_prefill is not None else self.answer_prefill
        needs: list[tuple[SubStageId, Literal["emitted"]]] = [(decider, "emitted")]
        return self._node("search web", self.models.web, "search", 1, needs, decides=True, feeds=(reader,))

    def web_page(self, search: SubStage, chunks: int, *, fetched: bool) -> list[SubStage]:
        """A search has found a page, which is read; not `fetched`: it is there already. chunks: as expected."""
        return self._page(search.id, chunks, fetched=fetched, look=self._look_prefill in search.feeds)

    def _page(self, decider: SubStageId, chunks: int, *, fetched: bool, look: bool) -> list[SubStage]:
        names = self.models
        fetch = [self._node("fetch", names.web, "fetch", 1, [(decider, "emitted")])] if fetched else []
        needs: list[tuple[SubStage | SubStageId, Literal["all", "emitted"]]] = [(decider, "emitted")]
        if fetch:
            needs = [(fetch[0], "all")]
        embed = self._node("embed page", names.embed, "encode", chunks, needs, item_bytes=self.sizes.chunk_bytes)
        rerank = self._node("rerank", names.rerank, "score", min(chunks, self.sizes.reranked), [(embed, "all")])
        return [*fetch, embed, rerank, *self._refined(rerank, chunks, look=look)]

    def _embedding(self) -> list[SubStage]:
        """Splitting and embedding of the documents."""
        names, sizes = self.models, self.sizes
        split = self._node("split", names.host, "split", sizes.chunks, private=sizes.private)
        embed = self._node(
            "embed",
            names.embed,
            "encode",
            sizes.chunks,
            [(split, "flow")],
            item_bytes=sizes.chunk_bytes,
            private=sizes.private,
        )
        self._embedded = embed.id
        return [split, embed]

    def _search(self, decider: SubStageId | None) -> list[SubStage]:
        names, sizes = self.models, self.sizes
        after: list[tuple[SubStageId, Literal["emitted"]]] = [] if decider is None else [(decider, "emitted")]
        question = self._node("embed question", names.embed, "encode", 1, after)
        needs: list[tuple[SubStage | SubStageId, Literal["all"]]] = [(question, "all")]
        if self._embedded is not None:
            needs.append((self._embedded, "all"))
        found = [question, self._node("search", names.host, "search", 1, needs, private=sizes.private)]
        if sizes.far:
            found.append(self._node("search far", names.far, "search", 1, after))
        items = max(1, min(sizes.chunks, sizes.reranked))
        searched: list[tuple[SubStage | SubStageId, Literal["all"]]] = [(node, "all") for node in found[1:]]
        rerank = self._node("rerank", names.rerank, "score", items, searched, item_bytes=sizes.chunk_bytes)
        return [*found, rerank]

    def _refined(self, rerank: SubStage, chunks: int, *, look: bool) -> list[SubStage]:
        """Refining what a search has found, and reading it before the answer."""
        fed = (self._look_prefill,) if look and self._look_prefill is not None else ()
        refine = self._agent("refine", self._kept_tokens(chunks) + INSTRUCTIONS, REFINED, [(rerank, "all")], feeds=fed)
        after: list[tuple[SubStage | SubStageId, Literal["all"]]] = [(refine[-1], "all")]
        if self._read is not None:
            after.append((self._read, "all"))
        read = self._node(
            "read",
            self.models.chat,
            "prefill",
            REFINED,
            after,
            ordered=True,
            feeds=(self.answer_prefill,),
            context="answer",
        )
        self._read = read.id
        return [*refine, read]

    def _kept_tokens(self, chunks: int) -> int:
        return min(chunks, self.sizes.kept) * self.sizes.chunk_tokens

    def _agent(
        self,
        stage: str,
        reads: int,
        writes: int,
        needs: Sequence[tuple[SubStage, Literal["all"]]] = (),
        *,
        decides: bool = False,
        feeds: tuple[SubStageId, ...] = (),
    ) -> list[SubStage]:
        self._texts += 1
        context = f"{stage} {self._texts}"
        prefill = self._node(
            f"{stage}.prefill",
            self.models.agent,
            "prefill",
            reads,
            needs,
            ordered=True,
            context=context,
            here=self.sizes.agents_here,
        )
        decode = self._node(
            f"{stage}.decode",
            self.models.agent,
            "decode",
            writes,
            [(prefill, "all")],
            ordered=True,
            open_ended=True,
            decides=decides,
            group=GROUP if decides else ANSWER_GROUP,
            feeds=feeds,
            context=context,
            here=self.sizes.agents_here,
        )
        return [prefill, decode]

    def _node(
        self,
        stage: str,
        model: str,
        phase: str,
        items: int,
        needs: Sequence[tuple[SubStage | SubStageId, Literal["all", "flow", "emitted"]]] = (),
        *,
        ordered: bool = False,
        open_ended: bool = False,
        decides: bool = False,
        group: int | None = None,
        private: bool = False,
        item_bytes: float = 4.0,
        feeds: tuple[SubStageId, ...] = (),
        context: str = "",
        here: bool = False,
    ) -> SubStage:
        dependencies = tuple(Dependency(at.id if isinstance(at, SubStage) else at, how) for at, how in needs)
        return SubStage(
            SubStageId(next(self.ids)),
            stage,
            model,
            phase,
            items,
            dependencies,
            feeds,
            ordered,
            open_ended,
            decides,
            group,
            private,
            item_bytes,
            self.request,
            self.workflow,
            context and f"{self.request}/{context}",
            here,
            self.owner,
        )
