"""`paceline bench workflow`: seconds of three RAG workflows on a phone's units, by how they are scheduled (HeRo).

The scheduler that `paceline.workflow` has, in virtual time, on profiles of the paper's two phones: 3 workflows, 4 data
sets, 2 families of models. Baselines and ablations are policies of the one scheduler. Not measured here: real units
and served workflows (`workflow_real`).

- `phones`: profiles modelled from the paper's table 2; `lengths`, `queries`: what is asked; `ways`: what is compared
- `cells`: one setting
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.workflow.flows import WorkflowName

from ..plots import bars
from ..report import Claim, Options, Report
from .cells import Bed, Cell, questions, seconds
from .lengths import DATA_SETS
from .phones import EFFICIENCIES, FAMILIES, PHONES, PUBLISHED, TABLE, Efficiency
from .ways import BEST_STATIC, GPU_ONLY, LESS, OURS, SINGLE, STATICS, WHOLE, Way, added

NAME: Final = "workflow"
SUMMARY: Final = "seconds of three RAG workflows on a phone's units; baselines: single unit, static maps, ablations"
ADDED: Final = added(STATICS[0].policy)
ABLATIONS: Final = (*ADDED, *LESS)
MAIN: Final = (*SINGLE, *STATICS, *ABLATIONS, WHOLE)
SHORT: Final = (*SINGLE[:2], *STATICS, WHOLE)
C1: Final = ("OnePlus 13", "Qwen3", "advanced", "FinQABench")  # the samples of the paper's table 3
C2: Final = ("OnePlus 13", "BGE and Llama 3", "research", "2WikiMultihopQA")
HERO: Final[Sequence[WorkflowName]] = ("fast", "advanced", "research")  # the paper's
LONGER: Final = 64  # tokens more of each answer, in a further table
Row = dict[str, object]
Seconds = dict[str, list[float]]  # way -> of each question


@dataclass(frozen=True, slots=True)
class Workload:
    questions: int = 4  # of each data set
    phones: Sequence[str] = tuple(PHONES)
    families: Sequence[str] = tuple(FAMILIES)
    workflows: Sequence[WorkflowName] = HERO
    data_sets: int = len(DATA_SETS)  # the last so many
    contention: float = 2.0  # kappa of operations that only read memory
    contentions: Sequence[float] = (0.0, 1.0, 4.0)  # of a further table


QUICK: Final = Workload(1, ("OnePlus 13",), ("Qwen3",), data_sets=1, contentions=())


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    measured: dict[str, dict[tuple[str, str, str, str], Seconds]] = {}
    rows: list[Row] = []
    for efficiency, ways in ((TABLE, MAIN), (PUBLISHED, SHORT)):
        phones = load.phones if efficiency is TABLE else [phone for phone in load.phones if phone == "OnePlus 13"]
        measured[efficiency.name] = {}
        for cell in _cells(load, efficiency, phones, load.contention):
            taken = _measure(cell, ways, load, options.data)
            measured[efficiency.name][_key(cell)] = taken
            rows += _rows(cell, taken)
    rows += _further(load, options.data)
    claims = _claims(measured[TABLE.name], "") + _claims(measured[PUBLISHED.name], "_published")
    return Report(NAME, _conditions(options, load), rows, claims)


def plot(report: Report) -> str:
    """Draw how many times as long the main ways take, by workflow: means over settings, from table 2."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in report.rows:
        if row.get("efficiency") == TABLE.name and "data" in row:
            found[str(row["workflow"]), str(row["way"])].append(float(str(row["vs_ours"])))
    shown = (GPU_ONLY, "NPU only", *(way.name for way in STATICS), OURS)
    drawn: list[Row] = [
        {"workflow": workflow, "way": way, "ratio": statistics.fmean(values)}
        for (workflow, way), values in found.items()
        if way in shown
    ]
    return bars(drawn, x="workflow", group="way", y="ratio", unit="seconds, as a multiple of ours", title=NAME)


def _cells(load: Workload, efficiency: Efficiency, phones: Sequence[str], contention: float) -> list[Cell]:
    return [
        Cell(bed, workflow, data_set)
        for phone in phones
        for family in load.families
        for bed in [Bed.of(phone, family, efficiency, contention)]
        for workflow in load.workflows
        for data_set in DATA_SETS[-load.data_sets :]
    ]


def _key(cell: Cell) -> tuple[str, str, str, str]:
    return cell.bed.phone, cell.bed.family, cell.workflow, cell.data_set.name


def _measure(cell: Cell, ways: Sequence[Way], load: Workload, data: Path | None, *, longer: int = 0) -> Seconds:
    """Seconds of each way, and of the fixed map that is the fastest here."""
    queries = questions(cell.data_set, data, load.questions)
    taken = {way.name: seconds(cell, way, queries, longer=longer) for way in ways}
    fixed = [taken[way.name] for way in STATICS if way.name in taken]
    if fixed:
        taken[BEST_STATIC] = min(fixed, key=statistics.fmean)
    return taken


def _rows(cell: Cell, taken: Seconds) -> list[Row]:
    ours = statistics.fmean(taken[OURS])
    return [
        cell.row | {"way": way, "seconds": statistics.fmean(each), "vs_ours": statistics.fmean(each) / ours}
        for way, each in taken.items()
    ]


def _further(load: Workload, data: Path | None) -> list[Row]:
    """Longer answers, and other contention, for the samples of the paper's table 3 (those in the workload)."""
    found: list[Row] = []
    cases = [("longer answers", load.contention, LONGER)] if load.contentions else []
    cases += [(f"contention {value:g}", value, 0) for value in load.contentions]
    ways = (*SINGLE[:1], *STATICS, WHOLE)
    for name, contention, longer in cases:
        for cell in _cells(load, TABLE, load.phones, contention):
            if _key(cell) in (C1, C2):
                taken = _measure(cell, ways, load, data, longer=longer)
                found += [{"part": name} | row for row in _rows(cell, taken)]
    return found


def _claims(cells: Mapping[tuple[str, str, str, str], Seconds], suffix: str) -> list[Claim]:
    """The claims under one assumption of efficiencies; none where nothing was measured with it."""
    if not cells:
        return []

    def ratios(way: str) -> dict[tuple[str, str, str, str], float]:
        return {key: statistics.fmean(taken[way]) / statistics.fmean(taken[OURS]) for key, taken in cells.items()}

    def mean(way: str) -> float:
        """Geometric mean over settings."""
        return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios(way).values()))

    claims = [
        Claim(f"workflow.vs_gpu_only{suffix}", max(ratios(GPU_ONLY).values()), 10.9, "higher", "up to 10.94x"),
        Claim(f"workflow.vs_npu_only{suffix}", mean("NPU only"), 1.0, "higher"),
        Claim(f"workflow.vs_static{suffix}", mean(STATICS[0].name), 1.5, "higher", "up to 1.5x; 1.52x and 3.20x"),
        Claim(f"workflow.vs_best_static{suffix}", mean(BEST_STATIC), 1.5, "higher"),
    ]
    for name, key, paper in (("c1", C1, "1.52x"), ("c2", C2, "3.20x")):
        if key in cells:
            claims.append(
                Claim(f"workflow.vs_best_static_{name}{suffix}", ratios(BEST_STATIC)[key], 1.5, "higher", paper)
            )
    known = [way.name for way in ABLATIONS if all(way.name in taken for taken in cells.values())]
    if known:
        claims.append(Claim("workflow.vs_ablations", min(map(mean, known)), 1.0, "higher"))
    claims += [Claim(f"workflow.vs_{_word(name)}", mean(name), 1.0, "higher") for name in known]
    return claims


def _word(name: str) -> str:
    return name.replace(" + ", "_plus_").replace(" ", "_").replace("-", "_")


def _conditions(options: Options, load: Workload) -> dict[str, object]:
    return {
        "clock": "virtual",
        "lengths": "of the data sets" if options.data else "built in",
        "questions": f"{load.questions} of each data set, one after another",
        "phones": {
            phone.name: {"operations_per_s": dict(phone.peaks), "gb_s": phone.bandwidth} for phone in PHONES.values()
        },
        "efficiencies": {
            each.name: {"compute": dict(each.compute), "memory": dict(each.memory)} for each in EFFICIENCIES
        },
        "contention": f"1 + {load.contention:g} (B / B0 - 0.6)+^2 for reading memory, a fifth of that for computing",
        "claims": "vs_gpu_only: the best setting; others: geometric means over settings; c1, c2: the paper's samples; "
        "vs_ablations: the strongest ablation",
        "quick": options.quick,
    }
