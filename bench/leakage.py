"""`paceline bench leakage`: what a curious cloud learns of a device's documents beyond the text of its answers.

A membership test (R31). The device is a node with the demo model, MiniLM and generated documents; the cloud is a bare
link that asks in sessions of its own and writes nothing, so that the device's documents alone decide. It guesses
sentences that stand in a document, and sentences like them that do not, and sees everything that a cloud sees. How well
that tells the two apart is the area under the ROC curve (AUC) of a cross-validated classifier; what is claimed is the
difference to the same classifier on the answers' text alone. Times of messages are not looked at.

The rows `weight: ...` add what a device would reveal if it sent the weight of its documents, as it once did under
`coin`: exactly, or in bins of the cosine.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from lab.training.texts.corpus import Fact, ask, draw_facts, state, write_document
from paceline.core.aggregation.weights import log_weight
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import EVERYBODY
from paceline.engine.base import LoadedModel
from paceline.engine.loader import load_model
from paceline.models import DEVICE
from paceline.rag.embedder import load_embedder
from paceline.rag.prompt import RELEVANCE_TEMPERATURE
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.asking import AskCounter, CloudAsks
from paceline.runtime.identity import PrivateKey, cloud_handshake, device_handshake
from paceline.runtime.link.connection import Link
from paceline.runtime.node import Node
from paceline.runtime.resources import Company, NodeParts
from paceline.strategies.registry import STRATEGIES
from paceline.wire.codec import decode_head, encode_options, sampling_to_wire
from paceline.wire.messages import (
    AggregateOptions,
    ChatMessage,
    CloseSession,
    Drafts,
    EvidenceWeight,
    Introduction,
    OpenSession,
    RetrievedPassages,
    SessionFrame,
    Targets,
)

from .aggregation.two_process_rig import StreamTransport
from .bootstrap import Estimate, estimate, worst_of
from .findings import claimed
from .guess_scores import Scored
from .report import Options, Report

NAME = "leakage"
SUMMARY = "membership of a sentence in a device's documents, from what the cloud sees beyond the answer"

SEED: Final = 31
FEW, MANY = 12, 150  # guesses of each kind
FACTS_A_DOCUMENT: Final = (2, 5)
MAX_TOKENS: Final = 40
RESAMPLES: Final = 500
LEVELS: Final[Mapping[str, tuple[str, str]]] = {  # privacy level and aggregator
    "document-private, mixture": ("document-private", "mixture"),
    "document-private, coin": ("document-private", "coin"),
    "open, mixture": ("open", "mixture"),
}
Kind = Literal["member", "other subject", "other value"]


@dataclass(frozen=True, slots=True)
class Guess:
    """A sentence that may stand in a document, and a question to which it would be the answer."""

    sentence: str
    question: str
    value: str


@dataclass(slots=True)
class Heard:
    """What the device sent in one session."""

    tokens: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    tops: list[float] = field(default_factory=list)  # of each distribution, the first probability
    num_passages: int = 0
    found_nothing: bool = False  # the device then has no part in the text

    def add(self, message: SessionFrame) -> None:
        match message:
            case Targets(start=start, tokens=tokens, lanes=lanes) if start <= len(self.tokens):
                fresh = slice(len(self.tokens) - start, None)
                self.tokens += tokens[fresh]
                self.lanes += lanes[fresh]
            case EvidenceWeight(log_weight=weight):
                self.weights.append(-9.0 if weight is None else weight)
            case RetrievedPassages(passages=passages):
                self.num_passages, self.found_nothing = len(passages), not passages
            case Drafts(dists=dists):
                self.tops += [float(decode_head(dist).probs.max(initial=0.0)) for dist in dists]

    def channels(self) -> list[float]:
        """Everything that is not the text."""
        tops = self.tops or [0.0]
        return [
            self.num_passages,
            *(self.lanes.count(lane) / max(1, len(self.lanes)) for lane in range(3)),
            self.weights[0] if self.weights else 0.0,
            tops[0],
            sum(tops) / len(tops),
            min(tops),
        ]


def run(options: Options) -> Report:
    found = asyncio.run(_measure(FEW if options.quick else MANY))
    beyond = [each.beyond for each in found if str(each.row["cloud_sees"]).startswith("document-private")]
    conditions = {
        "model": "demo device model",
        "embedder": "minilm",
        "documents_read": 2,
        "seed": SEED,
        "privacy": f"{', '.join(LEVELS)}; claimed at document-private",
        "interval_90": "resampled guesses, each scored by the model that was fitted without it",
        "quick": options.quick,
    }
    claim = claimed("leakage.auc_beyond_text", worst_of(beyond, "lower"), 0.05, "lower")
    return Report(NAME, conditions, [each.row for each in found], (claim,))


@dataclass(frozen=True, slots=True)
class Found:
    """A row, and what the cloud gains beside the text."""

    row: dict[str, object]
    beyond: Estimate


async def _measure(count: int) -> list[Found]:
    rng = random.Random(SEED)
    documents, guesses = corpus(rng, count)
    model = load_model(str(DEVICE), threads=1)
    rows: list[Found] = []
    with (
        tempfile.TemporaryDirectory(prefix="paceline-leakage-") as folder,
        DocumentStore.open(Path(folder), load_embedder("minilm"), side="device") as store,
    ):
        for number, text in enumerate(documents):
            store.add_text(f"{number}.md", text, zone="device")
        async with asked_device(model, store) as cloud:
            asked = Cloud(cloud, model)
            for name, (privacy, aggregator) in LEVELS.items():
                rows += await _rows(asked, store, name, privacy, aggregator, guesses)
    return rows


async def _rows(
    cloud: Cloud,
    store: DocumentStore,
    name: str,
    privacy: str,
    aggregator: str,
    guesses: Mapping[Kind, Sequence[Guess]],
) -> list[Found]:
    texts: dict[Kind, list[list[float]]] = {}
    channels: dict[Kind, list[list[float]]] = {}
    for kind, each_kind in guesses.items():
        texts[kind], channels[kind] = [], []
        for guess in each_kind:
            said = [await cloud.ask(text, privacy, aggregator) for text in (guess.sentence, guess.question)]
            texts[kind].append([each for one in said for each in text_of(guess, cloud.text(one))])
            channels[kind].append([each for one in said for each in one.channels()])
    rows = []
    others: tuple[Kind, Kind] = ("other subject", "other value")
    for other in others:
        seen = {name: channels}
        if aggregator == "coin":  # where weights were sent
            for bins, binned in BINS.items():
                seen[f"weight: {bins}"] = {
                    kind: [[binned(store, guess.sentence)] for guess in guesses[kind]] for kind in ("member", other)
                }
        for sees, found in seen.items():
            text = Scored.of(texts["member"], texts[other])
            both = Scored.of(_beside(texts["member"], found["member"]), _beside(texts[other], found[other]))
            beyond = _beyond(text, both)
            rows.append(
                Found(
                    {
                        "cloud_sees": sees,
                        "non_members": other,
                        "n": len(texts["member"]),
                        "auc_text": round(text.area(), 3),
                        "auc_alone": round(Scored.of(found["member"], found[other]).area(), 3),
                        "auc_both": round(both.area(), 3),
                        "beyond_text": round(beyond.value, 3),
                        "interval_90": beyond.interval,
                    },
                    beyond,
                )
            )
    return rows


def _beyond(text: Scored, both: Scored) -> Estimate:
    """Area that all else adds to the text's, over the same guesses."""
    return estimate(len(text.members), lambda among: both.area(among) - text.area(among), RESAMPLES)


def _beside(left: Sequence[list[float]], right: Sequence[list[float]]) -> list[list[float]]:
    return [[*one, *other] for one, other in zip(left, right, strict=True)]


# ---- documents and guesses -------------------------------------------------------------------------------------------
def corpus(rng: random.Random, count: int) -> tuple[list[str], dict[Kind, list[Guess]]]:
    """Documents, a sentence guessed of each, and as many guesses that stand in none of them."""
    documents: list[str] = []
    guesses: dict[Kind, list[Guess]] = {"member": [], "other subject": [], "other value": []}
    while len(documents) < count:
        facts = draw_facts(rng, "held_out", rng.randint(*FACTS_A_DOCUMENT))
        documents.append(write_document(rng, "held_out", facts, filler=0.3))
        fact = rng.choice(facts)
        guesses["member"].append(_guess(rng, fact))
        other = fact.value
        while other == fact.value:
            other = fact.attribute.value(rng, "held_out")
        guesses["other value"].append(_guess(rng, Fact(fact.entity, fact.attribute, other)))
        guesses["other subject"].append(_guess(rng, draw_facts(rng, "held_out", 1)[0]))
    return documents, guesses


def _guess(rng: random.Random, fact: Fact) -> Guess:
    return Guess(state(rng, fact, None), ask(rng, fact), fact.value)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def text_of(guess: Guess, answer: str) -> list[float]:
    """What the text of an answer says of a guess; nothing (NaN) where the device writes none."""
    if not answer:
        return [math.nan] * 5
    said, guessed, value = words(answer), words(guess.sentence), words(guess.value)
    return [
        len(said & guessed) / len(guessed),
        len(said & value) / max(1, len(value)),
        float(guess.value.lower() in answer.lower()),
        float(bool(said & {"not", "no"})),
        math.log(1 + len(said)),
    ]


def _cosines(store: DocumentStore, text: str) -> list[float]:
    return [passage.score for passage in store.search(text, 2)]


def _log_h(cosines: Sequence[float]) -> float:
    return log_weight([cosine / RELEVANCE_TEMPERATURE for cosine in cosines]) if cosines else -9.0


def _in_bins(width: float) -> Callable[[DocumentStore, str], float]:
    return lambda store, text: _log_h([(math.floor(each / width) + 0.5) * width for each in _cosines(store, text)])


BINS: Final[Mapping[str, Callable[[DocumentStore, str], float]]] = {
    "exact": lambda store, text: _log_h(_cosines(store, text)),
    "bins of 0.1": _in_bins(0.1),
    "bins of 0.25": _in_bins(0.25),
    "bins of 0.5": _in_bins(0.5),
    "the number of passages": lambda store, text: float(len(_cosines(store, text))),
}


# ---- the cloud -------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def asked_device(model: LoadedModel, store: DocumentStore) -> AsyncIterator[Link]:
    """The cloud's end of a link to a device that everybody may ask as often as they like."""
    asks = CloudAsks(EVERYBODY, AskCounter(sys.maxsize, sys.maxsize))
    node = Node("device", model, store, NodeParts(company=Company(open_to_peer=True, asks=asks)))
    model_info = model.engine.info
    strategies = list(STRATEGIES)
    known = Introduction(model.tokenizer.fingerprint, model_info.fingerprint, "demo", strategies, 1, asked_by=None)
    device_key, cloud_key = PrivateKey.generate(), PrivateKey.generate()

    async def admit(_: object) -> bytes:
        return device_key.public_key

    left, right = socket.socketpair()
    async with node, asyncio.TaskGroup() as tasks:
        device = Link(
            StreamTransport(*await asyncio.open_connection(sock=left)),
            device_handshake(known, device="device", keys=[device_key], server_key=cloud_key.public_key),
            on_up=lambda link: node.on_link(link, "cloud"),
        )
        cloud = Link(
            StreamTransport(*await asyncio.open_connection(sock=right)),
            cloud_handshake(known, cloud_key),
            authenticate=admit,
        )
        for link in (device, cloud):
            tasks.create_task(link.run())
        await device.up.wait()
        await cloud.up.wait()
        try:
            yield cloud
        finally:
            await device.close()
            await cloud.closed.wait()


@dataclass(frozen=True, slots=True)
class Cloud:
    link: Link
    model: LoadedModel

    def text(self, heard: Heard) -> str:
        return self.model.tokenizer.decode(heard.tokens)

    async def ask(self, text: str, privacy: str, aggregator: str) -> Heard:
        """Ask the device, with no documents and no words of the cloud's own."""
        heard, ended, eos = Heard(), asyncio.Event(), self.model.tokenizer.eos_ids

        def received(message: SessionFrame) -> None:
            heard.add(message)
            is_whole = len(heard.tokens) >= MAX_TOKENS or eos & {*heard.tokens[-1:]}
            if is_whole or heard.found_nothing or isinstance(message, CloseSession):
                ended.set()

        number = self.link.open_session(received)
        sampling = SamplingParams(temperature=0.0 if aggregator == "mixture" else 1.0, seed=SEED)
        opening = OpenSession(
            session=number,
            strategy="aggregate",
            messages=[ChatMessage("user", text)],
            query="",
            sampling=sampling_to_wire(sampling),
            max_tokens=MAX_TOKENS,
            top_k_documents=2,
            privacy=privacy,
            options=encode_options(AggregateOptions(aggregator=aggregator)),
            targets=[],
            epoch=0,
            constraint=None,
            asker="",
        )
        for message in (opening, EvidenceWeight(number, 0, None)):
            self.link.send(message)
        await ended.wait()
        self.link.detach(number)
        return heard
