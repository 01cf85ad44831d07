"""Answers of two demonstration models through the real engines and strategies, over a simulated network.

One side alone uses the strategy `autoregressive`; both sides use `aggregate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.configs import a_config
from lab.simulation import SimulatedRequest, Simulation
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine, LoadedModel
from paceline.engine.loader import load_model
from paceline.rag.embedder import Embedder
from paceline.rag.prompt import RELEVANCE_TEMPERATURE
from paceline.runtime.sessions.prompts import device_log_weight
from paceline.strategies.base import SIDES, Branch, RoutingContext, Side, Wish
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DraftLimits

LIMIT = 96  # tokens per answer at most


@dataclass(frozen=True, slots=True)
class Pair:
    """Both models, and the embedder that weighs their documents; None: even weights."""

    models: Mapping[Side, LoadedModel]
    embedder: Embedder | None = None
    temperature: float = RELEVANCE_TEMPERATURE

    @staticmethod
    def load(device: Path, cloud: Path, *, threads: int | None = None) -> Pair:
        paths: Mapping[Side, Path] = {"device": device, "cloud": cloud}
        return Pair({side: load_model(str(path), threads=threads) for side, path in paths.items()})

    def answer(self, question: str, documents: Mapping[Side, str | None]) -> str:
        """Answer greedily with the sides named in `documents`, each with its document or None."""
        sides = [side for side in SIDES if side in documents]
        scores = self._scores(question, sides, [documents[side] for side in sides])
        return self.write(
            {
                side: (self._branch(side, question, documents[side], score),)
                for side, score in zip(sides, scores, strict=True)
            }
        )

    def write(self, branches: Mapping[Side, Sequence[Branch]], options: Mapping[str, object] = {}) -> str:
        """Answer greedily from these prompts of one side or both. options: of the strategy."""
        return self.write_each([branches], options)[0]

    def write_each(
        self, prompts: Sequence[Mapping[Side, Sequence[Branch]]], options: Mapping[str, object] = {}
    ) -> list[str]:
        """Answers to several questions, as `write` gives each, written side by side: their rows share forwards."""
        requests = [self._request(branches, options) for branches in prompts]
        engines: dict[str, Engine] = {side: self.models[side].engine for side in SIDES}
        world = Simulation(requests, engines)  # no text depends on the delays of a network
        world.run(checks=False)
        answers = zip(requests, world.answers, strict=True)
        return [self.models[request.side_of(request.front)].tokenizer.decode(each.tokens) for request, each in answers]

    def _request(self, branches: Mapping[Side, Sequence[Branch]], options: Mapping[str, object]) -> SimulatedRequest:
        sides = [side for side in SIDES if side in branches]
        front = sides[0]
        tokenizer, engine = self.models[front].tokenizer, self.models[front].engine
        strategy = STRATEGIES["aggregate" if len(sides) > 1 else "autoregressive"]
        sampling = SamplingParams(temperature=0.0)
        plain = {"drafting": DraftLimits(width=1, rows=1, ahead=0)}  # drafts change no token, cost time
        chosen = strategy.options_for(
            RoutingContext(front, Wish(strategy.name, sampling, options=plain | dict(options)))
        )
        assert chosen is not None, "neither strategy declines"
        config = a_config(front, True, sampling, LIMIT, tokenizer.eos_ids, engine.info.vocab_size, chosen)
        prompts: dict[str, tuple[Branch, ...]] = {side: tuple(branches[side]) for side in sides}
        return SimulatedRequest(strategy, front, config, prompts)

    def _scores(self, question: str, sides: Sequence[Side], documents: Sequence[str | None]) -> list[float | None]:
        if self.embedder is None:
            return [None if document is None else 0.0 for document in documents]
        vectors = self.embedder.embed([question, *(document or "" for document in documents)])
        scores = (vectors[1:] @ vectors[0] / self.temperature).tolist()
        if len(sides) > 1:
            scores[sides.index("device")] = device_log_weight(
                self.temperature
            )  # as in a request: see `PromptSet.without_relevance`
        return [None if document is None else score for document, score in zip(documents, scores, strict=True)]

    def _branch(self, side: Side, question: str, document: str | None, score: float | None) -> Branch:
        messages = [{"role": "user", "content": question}]
        tokenizer = self.models[side].tokenizer
        if document is None:
            return Branch(tuple(tokenizer.chat(messages)), None)
        preamble, passage, tail = tokenizer.document_prompt(messages, document)
        return Branch((*preamble, *passage, *tail), score)
