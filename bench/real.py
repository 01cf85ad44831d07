"""`paceline bench real`: three strategies on real models, in virtual time: what drafts are worth, how alike texts are.

The models' distributions are computed, so that acceptance, tokens a forward and bytes are theirs; the time of a forward
is the time in which its weights, in bfloat16, are read at 30 GB/s, and of each further row 1 ms. Greedy answers, one
after another; what each way learns is kept. Prompts are Spec-Bench's (with a data folder), for `aggregate` those
questions of `bench/questions/notes.json` that need a document of each side, found as in a request. There are no aims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lab.baselines.dragon import SHAPES
from lab.configs import a_config, changed
from lab.demo_pair import Pair
from lab.engines import WrappedEngine
from lab.simulation import Network, SimulatedRequest, Simulation, StepCost
from paceline.core.batching.segment import Batch
from paceline.core.drafting.budget import OnlineStats
from paceline.core.drafting.lookup_table import LookupTable
from paceline.core.sampling.sampler import SamplingParams
from paceline.core.side import SIDES, Side
from paceline.engine.base import Output
from paceline.rag.embedder import load_embedder
from paceline.strategies.base import Branch
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import AggregateOptions, OpenSession, Options

from . import notes
from .bootstrap import estimate, share_of
from .draft_verify import grid
from .drafting.workloads import chat_prompts, questions
from .findings import Findings, claimed
from .models import PAIRS, RealModels
from .report import Claim, Report
from .report import Options as BenchOptions

NAME = "real"
SUMMARY = "drafts accepted, tokens a forward and bytes of real models' answers, in virtual time"
MODELS: Final = True

READ_BYTES_S: Final = 30e9
ROW_S: Final = 0.001
RTT_S: Final = 0.05
PLAIN: Final = "plain"
Branches = Mapping[Side, tuple[Branch, ...]]


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy as a client asks for it."""

    strategy: str
    front: Side = "cloud"
    options: Options | None = None
    sides: tuple[Side, ...] = SIDES  # whose documents are read

    @property
    def decider(self) -> Side:
        return "cloud" if self.strategy == "draft_verify" else self.front


PARTS: Final[Mapping[str, Mapping[str, Way]]] = {  # the last of each is what the first is compared with
    "lookup_tree": {
        "lookup_tree": Way("lookup_tree", sides=("cloud",)),
        PLAIN: Way("autoregressive", sides=("cloud",)),
    },
    "draft_verify": {
        "ours": Way("draft_verify", "device", grid.WAYS[grid.OURS]),
        "static 7": Way("draft_verify", "device", grid.WAYS["static 7"]),
        grid.PLAIN: Way("draft_verify", "device", grid.WAYS[grid.PLAIN]),
    },
    "aggregate": {
        "trees": Way("aggregate", "device", AggregateOptions(aggregator="mixture")),
        "device alone": Way("autoregressive", "device", sides=("device",)),
        "token by token": Way("aggregate", "device", AggregateOptions(aggregator="mixture", drafting=SHAPES["none"])),
    },
}


@dataclass(frozen=True, slots=True)
class Load:
    prompts: int = 4  # of each of Spec-Bench's six tasks
    questions: int = 12  # of two sides
    tokens: int = 48  # of an answer at most
    longest: int = 256  # tokens of a prompt


QUICK: Final = Load(prompts=1, questions=4, tokens=32, longest=128)


@dataclass(slots=True)
class Taken:
    """One answer."""

    tokens: tuple[int, ...]
    seconds: float  # virtual, prompts included
    stats: Mapping[str, float]  # of the side that faces the client
    forwards: int  # of the model that decides, prompts included
    num_bytes: int  # both directions, without the opening


class Counted(WrappedEngine):
    """Engine that counts its forwards."""

    forwards = 0

    def forward(self, batch: Batch) -> Output:
        self.forwards += 1
        return super().forward(batch)

    def take(self) -> int:
        """Those since the last call."""
        taken, self.forwards = self.forwards, 0
        return taken


@dataclass(slots=True)
class Rig:
    """Both models and what each way has learnt."""

    engines: Mapping[str, Counted]  # by side
    eos_ids: frozenset[int]
    forward: Mapping[str, StepCost]
    tokens: int
    learnt: dict[str, tuple[LookupTable, dict[Side, OnlineStats]]] = field(default_factory=dict)

    def play(self, name: str, way: Way, branches: Branches) -> Taken:
        vocab = self.engines[way.front].info.vocab_size
        table, stats = self.learnt.setdefault(name, (LookupTable(vocab), {side: OnlineStats() for side in SIDES}))
        options = {} if way.options is None else {"options": way.options}
        config = a_config(way.front, True, SamplingParams(temperature=0.0), self.tokens, self.eos_ids, vocab, **options)
        config = changed(config, needs_dists=False, table=table)
        asked: dict[str, tuple[Branch, ...]] = {side: branches[side] for side in way.sides}
        request = SimulatedRequest(STRATEGIES[way.strategy], way.front, config, asked)
        network = Network((RTT_S / 2, RTT_S / 2))
        world = Simulation(request, self.engines, network=network, forward=self.forward)
        for side in SIDES:  # each keeps what it has measured
            world.session(side).request = replace(request, config=changed(config, stats=stats[side]))
        front = world.run(checks=False)
        assert front.finished is not None, "it has run to its end"
        sent = sum(each.num_bytes for each in world.messages if not isinstance(each.message, OpenSession))
        forwards = {side: engine.take() for side, engine in self.engines.items()}[way.decider]
        return Taken(tuple(front.tokens), world.now, front.finished.stats, forwards, sent)


def run(options: BenchOptions, load: Load | None = None) -> Report:
    load = load or (QUICK if options.quick else Load())
    models = options.models or RealModels.parse(next(iter(PAIRS)))
    loaded = {side: models.load(side) for side in SIDES}
    asked = questions(options.data, load.prompts)
    prompts = chat_prompts(models.label, loaded, asked, load.longest)
    engines = {str(side): Counted(loaded[side].engine) for side in SIDES}
    forward: dict[str, StepCost] = {
        side: StepCost(2 * engines[side].info.num_weights / READ_BYTES_S, ROW_S) for side in SIDES
    }
    rig = Rig(engines, prompts.eos_ids, forward, load.tokens)
    texts = [dict.fromkeys(SIDES, (Branch(prompt, None),)) for prompt in prompts.every()]
    found = Findings()
    for part, ways in PARTS.items():
        each = list(two_sided(Pair(loaded), load.questions)) if part == "aggregate" else texts
        found.add(_part(rig, part, ways, each))
    conditions = {
        "clock": "virtual; distributions are the models' own",
        "models": models.label,
        "forward_s": {side: round(cost.base_s, 4) for side, cost in forward.items()},
        "row_s": ROW_S,
        "rtt_s": RTT_S,
        "prompts": f"{'Spec-Bench, first turns' if options.data else 'made up, of Spec-Bench tasks'}, {len(texts)}",
        "answers": f"at most {load.tokens} tokens, greedy; prompts of at most {load.longest}",
        "documents": f"{load.questions} questions of questions/notes.json for two sides, two passages a side",
        "interval_90": "resampled prompts; ratios are of sums",
        "quick": options.quick,
    }
    return Report(NAME, conditions, found.rows, found.claims)


def two_sided(pair: Pair, count: int) -> Iterator[Branches]:
    """Prompts of both sides with what each finds."""
    documents, all_questions = notes.load()
    chosen = [each for each in all_questions if each.kind == "two"][:count]
    with notes.stored(documents, load_embedder("minilm")) as stores:
        for each in chosen:
            yield {side: notes.prompts(pair, side, stores[side], each.text).branches for side in SIDES}


# ---- results ---------------------------------------------------------------------------------------------------------
def _part(rig: Rig, part: str, ways: Mapping[str, Way], prompts: Sequence[Branches]) -> Findings:
    taken = {name: [rig.play(f"{part} {name}", way, each) for each in prompts] for name, way in ways.items()}
    found = Findings()
    first, *_, last = taken
    for name, answers in taken.items():
        total = {key: sum(each.stats.get(key, 0.0) for each in answers) for key in _COUNTED}
        tokens = sum(len(each.tokens) for each in answers)
        row: dict[str, object] = {
            "part": part,
            "way": name,
            "ms_per_token": 1e3 * sum(each.seconds for each in answers) / tokens,
            "tokens_per_forward": tokens / sum(each.forwards for each in answers),
            "bytes_per_token": sum(each.num_bytes for each in answers) / tokens,
            "same_text": sum(each.tokens == other.tokens for each, other in zip(answers, taken[last], strict=True)),
            "n": len(answers),
        }
        for drafted in ("drafted", "drafted_device", "drafted_cloud"):
            if total[drafted]:
                accepted = total[drafted.replace("drafted", "accepted")]
                row[drafted.replace("drafted", "acceptance")] = accepted / total[drafted]
        found.rows.append(row)
    for name in list(taken)[1:]:
        found.claims.append(_times(f"real.{part}_vs_{name.replace(' ', '_')}", taken[name], taken[first], _per_token))
    if part != "aggregate":  # whose forwards go ahead of the link, wanted or not
        found.claims.append(_times(f"real.{part}_tokens_per_forward", taken[last], taken[first], _per_forward))
    same = share_of([a.tokens == b.tokens for a, b in zip(taken[first], taken[last], strict=True)])
    found.claims.append(claimed(f"real.{part}_same_text", same, None, "higher"))
    return found


_COUNTED: Final = tuple(f"{what}{side}" for what in ("drafted", "accepted") for side in ("", "_device", "_cloud"))


def _per_token(answers: Sequence[Taken]) -> float:
    return sum(each.seconds for each in answers) / sum(len(each.tokens) for each in answers)


def _per_forward(answers: Sequence[Taken]) -> float:
    return sum(each.forwards for each in answers) / sum(len(each.tokens) for each in answers)


def _times(name: str, above: Sequence[Taken], below: Sequence[Taken], of: Callable[[Sequence[Taken]], float]) -> Claim:
    """How many times as much the first takes as the second; both answer the same prompts, which are resampled."""

    def ratio(among: Sequence[int]) -> float:
        return of([above[i] for i in among]) / of([below[i] for i in among])

    return claimed(name, estimate(len(above), ratio), None, "higher")
