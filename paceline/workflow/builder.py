"""The three workflows as sub-stages: `fast`, `advanced` and `research` (HeRo, 6.1).

- fast: documents are split, embedded, searched, reranked; the answer is generated from the best passages
- advanced: besides, a small model rewrites the question as sub-questions, each of which is searched for as soon as it
  is written, and passages are refined before they are read: those of a search of both sides in one text, or each zone's
  in one of its own
- research: besides, a plan asks for pages of the web, and a second look at what they hold may ask for more

Where documents were split and embedded before, the workflows begin with the search.

Documents are private; the question, its sub-questions and the web are not. The second look reads what came from the web
only, so that nothing of the documents is in a request to the web. What is named `public` needs nothing private, so it
may run on another side: public passages are reranked and chosen without regard to private ones, which would otherwise
show in what is sent. Texts are not handled here: only numbers of items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from paceline.workflow.graph import Dependency, SubStage, SubStageId, WorkflowModels

# What is expected of a workflow beyond what is observed: which stages its agents add, and how much work those are.
#
# A template counts, over the workflows that have ended, how often a deciding stage led to another stage, and the items
# of each. It begins with priors, which weigh as much as a few workflows. See `builder` for the sub-stages themselves.
#
# Stages named `public` read what came of the cloud or of the web alone; a rerank or a refinement without that word may
# read private passages.


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


WorkflowName = Literal["fast", "advanced", "research"]
WORKFLOWS: Final[tuple[WorkflowName, ...]] = ("fast", "advanced", "research")
INSTRUCTIONS: Final = 40  # tokens around what a model reads
NONE: Final = SubStageId(0)
GROUP: Final = 4  # tokens an agent writes before others see them
ANSWER_GROUP: Final = 16  # tokens of an answer in a launch
PUBLIC: Final = " public"  # ends the name of a stage that reads what came of the cloud or of the web alone
Needs = Sequence[tuple[SubStage, Literal["all"]]]


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
    apart: bool = False  # what a search of the other side has found is refined in a text of its own


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
        decider, sizes = self.rewrite if rewritten else None, self.sizes
        if not (sizes.far and sizes.apart):
            found = self._search(decider)
            refining = self._refining([found[-1]], sizes.chunks)
            return [*found, *refining, self._reading(refining[-1:])]
        near, far = self._search_here(decider), self._search_far(decider)
        ranked = self._reranking(near[-1:], sizes.chunks)
        public = self._reranking([far], sizes.chunks, PUBLIC)
        refining = self._refining([ranked, public], sizes.chunks)  # the best of both
        beside = self._refining([public], sizes.chunks, PUBLIC)
        return [*near, far, ranked, public, *refining, *beside, self._reading([refining[-1], beside[-1]])]

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
        rerank = self._reranking([embed], chunks, PUBLIC)
        fed = (self._look_prefill,) if look and self._look_prefill is not None else ()
        refining = self._refining([rerank], chunks, PUBLIC, fed)
        return [*fetch, embed, rerank, *refining, self._reading(refining[-1:])]

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
        """Search where there is anything, and rerank what all of it has found together."""
        found = self._search_here(decider)
        if self.sizes.far:
            found.append(self._search_far(decider))
        return [*found, self._reranking(found[1:], self.sizes.chunks)]

    def _search_here(self, decider: SubStageId | None) -> list[SubStage]:
        names, sizes = self.models, self.sizes
        question = self._node("embed question", names.embed, "encode", 1, _emitted(decider))
        needs: list[tuple[SubStage | SubStageId, Literal["all"]]] = [(question, "all")]
        if self._embedded is not None:
            needs.append((self._embedded, "all"))
        return [question, self._node("search", names.host, "search", 1, needs, private=sizes.private)]

    def _search_far(self, decider: SubStageId | None) -> SubStage:
        return self._node("search far", self.models.far, "search", 1, _emitted(decider))

    def _reranking(self, searches: Sequence[SubStage], chunks: int, zone: str = "") -> SubStage:
        items, size = max(1, min(chunks, self.sizes.reranked)), self.sizes.chunk_bytes
        needs: Needs = [(node, "all") for node in searches]
        return self._node(f"rerank{zone}", self.models.rerank, "score", items, needs, item_bytes=size)

    def _refining(
        self, ranked: Sequence[SubStage], chunks: int, zone: str = "", feeds: tuple[SubStageId, ...] = ()
    ) -> list[SubStage]:
        needs: Needs = [(node, "all") for node in ranked]
        return self._agent(f"refine{zone}", self._kept_tokens(chunks) + INSTRUCTIONS, REFINED, needs, feeds=feeds)

    def _reading(self, refined: Sequence[SubStage]) -> SubStage:
        """Reading what was refined, before the answer."""
        after: list[tuple[SubStage | SubStageId, Literal["all"]]] = [(node, "all") for node in refined]
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
        return read

    def _kept_tokens(self, chunks: int) -> int:
        return min(chunks, self.sizes.kept) * self.sizes.chunk_tokens

    def _agent(
        self,
        stage: str,
        reads: int,
        writes: int,
        needs: Needs = (),
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


def _emitted(decider: SubStageId | None) -> list[tuple[SubStageId, Literal["emitted"]]]:
    return [] if decider is None else [(decider, "emitted")]
