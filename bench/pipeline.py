"""`paceline bench pipeline`: accepted tokens a second of a model in stages, by how drafts flow through them (FlowSpec).

The served machines in virtual time, on stages that take a stated time for a forward pass. The texts are those of the
cloud's demonstration model, recorded once and played again for every method; the drafts of all are those of the
device's, which runs beside the stages. Baselines and ablations are in `lab.baselines.flowspec`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Final

from lab.baselines import flowspec
from lab.configs import a_config
from lab.simulation import SimulatedRequest, SimulatedSession, Simulation, StageTimes
from paceline.core.drafting.budget import OnlineStats
from paceline.core.sampling.sampler import SamplingParams
from paceline.engine.base import Engine
from paceline.strategies.base import Branch, Strategy
from paceline.strategies.pipeline import TREE_NODES
from paceline.strategies.registry import STRATEGIES
from paceline.wire.messages import DraftLimits
from paceline.wire.messages import Options as StrategyOptions

from .drafting.workloads import demo_pair
from .report import Claim, Options, Report
from .speculation.processes import QUICK_PROCESSES, ProcessLoad
from .speculation.processes import measure as measure_processes
from .speculation.recorded import RecordedEngine, Recording
from .speculation.tasks import flowspec_questions

NAME: Final = "pipeline"
SUMMARY: Final = "accepted tokens/s of a model in stages; baselines: autoregressive, naive, pruned, PipeDec"
PLAIN: Final = "autoregressive"
FULL: Final = "full"
WAYS: Final[Mapping[str, Strategy]] = {
    PLAIN: STRATEGIES[PLAIN],
    **{way: flowspec.strategy_of(way) for way in flowspec.WAYS},
}
ORDERED: Final = ("naive", "pruned", "without score order", FULL)
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: int = 2  # of a task
    tokens: int = 96  # of an answer
    temperatures: Sequence[float] = (0.0, 1.0)
    tasks: int | None = None  # the first so many; None: all
    stages: int = 4  # 0: an engine of its own
    forward_s: float = 0.05  # of a stage, for one row
    row_s: float = 0.00015  # for each further one: 16 rows take 4.5 % longer than one
    hop_s: float = 0.002  # between two stages
    layer_s: float = 0.005  # of the draft model's forward
    stage_counts: Sequence[int] = field(default=(1, 2, 4, 6))  # of a further table, at temperature 0 and the first task
    hops: Sequence[float] = field(default=(0.0, 0.01, 0.025, 0.05))  # s, likewise
    # s of a draft model's forward, of a table of one engine whose forward takes `whole_s`
    draft_times: Sequence[float] = field(default=(0.01, 0.03, 0.1))
    whole_s: float = 0.1
    max_prompt: int = 400  # tokens; of a longer one the beginning is used
    processes: ProcessLoad | None = field(default_factory=ProcessLoad)  # None: the virtual clock alone


QUICK: Final = Workload(prompts=1, tokens=32, tasks=1, stage_counts=(2,), hops=(0.025,), processes=QUICK_PROCESSES)


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    asked = flowspec_questions(options.data, load.prompts)
    model = demo_pair(dict(list(asked.items())[: load.tasks]))
    draft_model = model.draft_model
    assert draft_model is not None
    bias = dict.fromkeys(model.eos_ids, -100.0)
    rows: list[Row] = []
    further: list[Row] = []
    for temperature in load.temperatures:
        stats = {way: OnlineStats() for way in WAYS}
        for task, prompts in model.prompts.items():
            recorded: list[Recording] = []
            for number, prompt in enumerate(prompts):
                sampling = SamplingParams(temperature=temperature, seed=number, logit_bias=bias)
                recorded.append(
                    Recording.of(model.engine, prompt[: load.max_prompt], sampling, load.tokens, model.vocab_size)
                )
            measured = {
                way: _measure(load, how, recorded, draft_model, model.vocab_size, stats[way])
                for way, how in WAYS.items()
            }
            plain = measured[PLAIN]
            rows += [
                {"task": task, "temperature": temperature, "way": way}
                | taken
                | {"vs_autoregressive": _ratio(taken, plain), "vs_naive": _ratio(taken, measured["naive"])}
                for way, taken in measured.items()
            ]
            if not further:
                further = _further(load, recorded, draft_model, model.vocab_size)
                further += _on_one_engine(load, recorded, draft_model, model.vocab_size)
    claims = _claims(rows, load)
    if load.processes is not None:
        real, more = measure_processes(load.processes, asked)
        further, claims = [*further, *real], [*claims, *more]
    return Report(NAME, _conditions(options, load, model.name), [*rows, *further], claims)


def _further(load: Workload, recorded: Sequence[Recording], draft_model: Engine, vocab_size: int) -> list[Row]:
    """The same answers by number of stages, of which each takes its part of the model's time, and by hop."""
    cases: list[tuple[str, float, int, float, float]] = [
        ("stages", count, count, load.forward_s * load.stages / count, load.hop_s) for count in load.stage_counts
    ]
    cases += [("hop_ms", hop * 1000, load.stages, load.forward_s, hop) for hop in load.hops]
    found: list[Row] = []
    for kind, value, stages, forward_s, hop_s in cases:
        changed = Workload(
            tokens=load.tokens, stages=stages, forward_s=forward_s, row_s=load.row_s * load.stages / stages, hop_s=hop_s
        )
        row: Row = {kind: value}
        for way in (PLAIN, "naive", FULL):
            taken = _measure(changed, WAYS[way], recorded, draft_model, vocab_size, OnlineStats())
            row[way] = taken["tokens_per_s"]
        found.append(row)
    return found


def _on_one_engine(load: Workload, recorded: Sequence[Recording], draft_model: Engine, vocab_size: int) -> list[Row]:
    """Tokens a second of `lookup_tree` on an engine of its own, with and without a draft model."""
    ours, plain = STRATEGIES["lookup_tree"], STRATEGIES[PLAIN]
    found: list[Row] = []
    for draft_s in load.draft_times:
        changed = replace(load, stages=0, forward_s=load.whole_s, hop_s=0.0, layer_s=draft_s)
        row: Row = {"draft_ms": 1000 * draft_s}
        for name, how, model in ((PLAIN, plain, None), ("tables", ours, None), ("tables and model", ours, draft_model)):
            row[name] = _measure(changed, how, recorded, model, vocab_size, OnlineStats())["tokens_per_s"]
        found.append(row)
    return found


def _measure(
    load: Workload,
    how: Strategy,
    recorded: Sequence[Recording],
    draft_model: Engine | None,
    vocab_size: int,
    learnt: OnlineStats,
) -> dict[str, float]:
    """Answers one after another, with what was learnt of the draft model before."""
    answers = [_answered(load, how, each, draft_model, vocab_size, learnt) for each in recorded]
    seconds, tokens = sum(s for s, _ in answers), sum(len(answer.tokens) - 1 for _, answer in answers)
    stats = [answer.finished.stats for _, answer in answers if answer.finished is not None]
    rounds = sum(each.get("rounds", 0.0) for each in stats)
    rows = sum(each.get("rows", 0.0) for each in stats)
    return {
        "tokens_per_s": tokens / seconds,
        "turns_per_token": seconds / tokens / (load.forward_s + load.hop_s),
        "tokens_per_round": tokens / rounds if rounds else 1.0,
        "rows_per_token": rows / tokens if rows else 1.0,
        "draft_forwards_per_token": sum(each.get("draft_forwards", 0.0) for each in stats) / tokens,
        "dropped_rows": sum(each.get("dropped", 0.0) for each in stats) / rows if rows else 0.0,
    }


def _answered(
    load: Workload,
    how: Strategy,
    recording: Recording,
    draft_model: Engine | None,
    vocab_size: int,
    learnt: OnlineStats,
) -> tuple[float, SimulatedSession]:
    """Virtual seconds from the first token to the last, and the answer."""
    config = a_config(
        "cloud",
        True,
        recording.sampling,
        load.tokens,
        frozenset(),
        vocab_size,
        StrategyOptions(rescoring=False),
        needs_dists=False,
        stats=learnt,
    )

    def forward(rows: int) -> float:
        return load.forward_s + load.row_s * (rows - 1)

    request = SimulatedRequest(how, "cloud", config, {"cloud": (Branch(recording.prompt, None),)})
    world = Simulation(
        request,
        {"cloud": RecordedEngine(recording, vocab_size)},
        forward={"cloud": forward},
        stages={"cloud": StageTimes(load.stages, forward, load.hop_s)} if load.stages else None,
        drafts={} if draft_model is None else {"cloud": (draft_model, load.layer_s)},
    )
    began: list[float] = []

    def look(world: Simulation) -> None:
        if world.front.tokens and not began:
            began.append(world.now)

    answer = world.run(look, checks=False)
    if tuple(answer.tokens) != recording.tokens:
        raise AssertionError("a method has changed the text")
    return world.now - began[0], answer


def _ratio(taken: Mapping[str, float], other: Mapping[str, float]) -> float:
    return taken["tokens_per_s"] / other["tokens_per_s"]


def _claims(rows: Sequence[Row], load: Workload) -> list[Claim]:
    def mean(way: str, against: str, temperature: float | None = None) -> float:
        """Mean over tasks (and temperatures) of the ratio."""
        cells: dict[tuple[object, object], dict[str, float]] = {}
        for row in rows:
            if temperature in (None, row["temperature"]):
                cell = cells.setdefault((row["task"], row["temperature"]), {})
                cell[str(row["way"])] = float(str(row["tokens_per_s"]))
        return statistics.fmean(cell[way] / cell[against] for cell in cells.values())

    claims = [
        Claim("pipeline.vs_naive", mean(FULL, "naive"), 1.8, "higher", "1.35x to 1.73x, up to 1.77x (FlowSpec)"),
        Claim("pipeline.vs_pipedec", mean(FULL, "PipeDec"), 1.1, "higher", "0.93x to 1.2x (FlowSpec, table 1)"),
        Claim("pipeline.vs_autoregressive", mean(FULL, PLAIN), 1.0, "higher"),
    ]
    claims += [
        Claim(f"pipeline.vs_naive_at_{temperature:g}", mean(FULL, "naive", temperature), 1.8, "higher")
        for temperature in load.temperatures
    ]
    for worse, better in pairwise(ORDERED):
        name = f"pipeline.{better.replace(' ', '_')}_vs_{worse.replace(' ', '_')}"
        claims.append(Claim(name, mean(better, worse), 1.0, "higher"))
    return claims


def _conditions(options: Options, load: Workload, model: str) -> dict[str, object]:
    return {
        "clock": "virtual; of the part processes emulated",
        "processes": None if load.processes is None else asdict(load.processes),
        "texts": "FlowSpec's question sets" if options.data else "generated",
        "model": f"{model}, end token banned; drafts of the device's demo model, 8 nodes a forward",
        "prompts_per_task": load.prompts,
        "tokens": load.tokens,
        "stages": load.stages,
        "stage_ms": [round(1000 * (load.forward_s + load.row_s * (rows - 1)), 2) for rows in (1, 16)],
        "hop_ms": load.hop_s * 1000,
        "draft_layer_ms": load.layer_s * 1000,
        "tree": TREE_NODES,
        "segment_rows": DraftLimits().rows,
    }
