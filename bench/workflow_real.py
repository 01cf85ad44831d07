"""`paceline bench workflow_real`: seconds of served workflows on real units, by how they are scheduled (HeRo).

A device with two host threads, each on a core of its own, a model in four lanes, and a cloud process behind an emulated
link, whose model may write texts of agents too. All ways are the served scheduler with another policy; each is a pair
of processes of its own, and each round asks all of them the same questions. Both sides have the same model, so that a
text is the same wherever it is written; its forwards are padded to a given time, which leaves the cores to search and
rerank, as where a model computes on a processor of its own. What agents decide is scripted (`workflow.program`).

Static maps have every stage that the program has: one of them sends all to the cloud that may go there. Where what a
search has found is refined in one text, a map or ours, that is a way of its own.

Not measured here: the cloud alone, which may not read private documents; units on memory that they do not share.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import httpx

from lab.scheduling import Ablation, static_map
from paceline.commands import demo
from paceline.commands.demo import Children, command
from paceline.core.side import SIDES, Side
from paceline.models import CLOUD

from .bootstrap import Estimate, ratio_of, worst_of
from .findings import claimed
from .report import Claim, Options, Report
from .workflow import program
from .workflow.town import Asked, documents, questions, web

NAME: Final = "workflow_real"
SUMMARY: Final = "seconds of served workflows on two cores and a cloud process; baselines: static maps, one core"
OURS, ONE_TEXT, ALONE = "ours", "ours, one text a search", "core 0 alone"
STATIC, STATIC_ASKING, STATIC_PUBLIC = (
    "static map",
    "static map, asking at the cloud",
    "static map, all public at the cloud",
)
STATICS: Final = (STATIC, STATIC_ASKING, STATIC_PUBLIC)
UNITS: Final = (
    "units.left.cores = [0]",
    "units.right.cores = [1]",
    "units.chat = {kind = 'engine', lanes = 4}",
)
ONE: Final = ("units.left.cores = [0]", "units.chat = {kind = 'engine', lanes = 1}", "cloud_texts = false")
MAP: Final = {"embed": "left", "host": "left", "rerank": "right", "agent": "chat", "chat": "chat"}
PROGRAM: Final = "program.json"  # in a pair's folder: see `workflow.program`
ASKING: Final = ("rewrite", "plan", "look")
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Workload:
    rounds: int = 6
    workflows: Sequence[str] = ("advanced", "research")
    forward_ms: int = 150  # of the device's model: long beside what the model really computes, also on busy cores
    cloud_ms: int = 50
    rtt_ms: int = 20
    web_s: float = 0.1  # of a search, and of a page
    tokens: int = 24  # of an answer


QUICK: Final = Workload(rounds=2)


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    policy: Ablation
    tuning: Sequence[str] = UNITS
    apart: bool = True  # each zone's passages are refined in a text of their own, where there is a cloud


def at_the_cloud(agents: Sequence[str]) -> Ablation:
    """The static map, with texts of these agents at the cloud."""
    return static_map(MAP | dict.fromkeys(agents, "cloud"))


WAYS: Final = (
    Way(OURS, Ablation()),
    Way(ONE_TEXT, Ablation(), apart=False),
    Way(STATIC, static_map(MAP), apart=False),
    Way(STATIC_ASKING, at_the_cloud(ASKING), apart=False),
    Way(STATIC_PUBLIC, at_the_cloud((*ASKING, "refine public"))),
    Way(ALONE, static_map({**MAP, "rerank": "left"}), ONE),
)


@dataclass(frozen=True, slots=True)
class Answered:
    seconds: float
    text: str
    stages: Mapping[str, float]  # s of all launches of a stage, waiting for lanes of the engine included
    away: int  # texts that the cloud wrote


def run(options: Options, workload: Workload | None = None) -> Report:
    load = workload or (QUICK if options.quick else Workload())
    taken: dict[tuple[str, str], list[Answered]] = defaultdict(list)
    asked = questions()
    with ExitStack() as stack:
        base = stack.enter_context(web(load.web_s))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pairs = [stack.push(_pair(way, folder, base, load, asked)) for way in WAYS]
        stack.enter_context(patch("paceline.commands.demo.command", _command))
        with ThreadPoolExecutor(len(WAYS)) as starting:
            started = starting.map(lambda pair: pair.__enter__(), pairs)
            urls = dict(zip((way.name for way in WAYS), started, strict=True))
        client = stack.enter_context(httpx.Client(timeout=600.0))
        for round_ in range(-1, load.rounds):  # the first one teaches the scheduler what its units take
            for workflow in load.workflows:
                question = asked[(round_ + 1) % len(asked)]
                for place in range(len(WAYS)):
                    way = WAYS[(place + round_) % len(WAYS)].name
                    answered = _ask(client, urls[way], workflow, question.question, load)
                    if round_ >= 0:
                        taken[workflow, way].append(answered)
    rows = [_row(workflow, way, each, taken[workflow, OURS]) for (workflow, way), each in taken.items()]
    return Report(NAME, _conditions(load), rows, _claims(taken, load))


@contextmanager
def _pair(way: Way, folder: Path, base: str, load: Workload, asked: Sequence[Asked]) -> Iterator[str]:
    """URL of a device of its own, linked with a cloud of its own."""
    own = folder / way.name.replace(" ", "_").replace(",", "")
    own.mkdir()
    files = {side: own / f"{side}.md" for side in SIDES}
    for side, text in documents().items():
        files[side].write_text(text)
    given = {
        "policy": asdict(way.policy),
        "apart": way.apart,
        "script": {each.question: dict(each.script) for each in asked},
    }
    (own / PROGRAM).write_text(json.dumps(given))
    paces = {"device": f"rtt={load.rtt_ms}ms,forward={load.forward_ms}ms", "cloud": f"forward={load.cloud_ms}ms"}
    tuning = {side: ("[tuning]", "threads = 1", f"emulate = {pace!r}") for side, pace in paces.items()}
    flags: dict[Side, Sequence[str]] = {
        "device": ("--web-search", base, *demo.configured(own, *tuning["device"], *way.tuning)),
        "cloud": demo.configured(own, *tuning["cloud"]),
    }
    with Children(own) as children:
        started = demo.start_pair(
            children,
            files,
            model=str(CLOUD),
            embedder="minilm",
            device="bench",
            flags=("--name", "demo"),
            side_flags=flags,
        )
        yield started.url("device")


def _command(*arguments: str) -> list[str]:
    """The command line of a program of a pair, with what its folder has for it."""
    if arguments[0] not in ("serve", "agent"):
        return command(*arguments)
    state = Path(arguments[arguments.index("--state-dir") + 1])
    return [sys.executable, str(Path(program.__file__)), str(state.parent / PROGRAM), *arguments]


def _ask(client: httpx.Client, url: str, workflow: str, question: str, load: Workload) -> Answered:
    body = {
        "model": f"demo:{workflow}",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": load.tokens,
        "paceline": {"report": True, "strategy": "autoregressive"},
    }
    began = time.perf_counter()
    reply = client.post(f"{url}/v1/chat/completions", json=body)
    seconds = time.perf_counter() - began
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    stages: dict[str, float] = defaultdict(float)
    for step in answer["paceline"]["steps"]:
        stages[step["stage"]] += step["seconds"]
    away = sum(step["unit"].startswith("cloud") for step in answer["paceline"]["steps"])
    return Answered(seconds, answer["choices"][0]["message"]["content"], stages, away)


def _ratio(taken: Sequence[Answered], ours: Sequence[Answered]) -> Estimate:
    return ratio_of([each.seconds for each in taken], [each.seconds for each in ours])


def _row(workflow: str, way: str, taken: Sequence[Answered], ours: Sequence[Answered]) -> Row:
    ratio = _ratio(taken, ours)
    names = sorted({name for each in taken for name in each.stages})
    return {
        "workflow": workflow,
        "way": way,
        "seconds": statistics.median(each.seconds for each in taken),
        "vs_ours": ratio.value,
        "vs_ours_interval": ratio.interval,
        "answers_as_ours": sum(each.text == own.text for each, own in zip(taken, ours, strict=True)) / len(taken),
        "texts_at_the_cloud": statistics.fmean(each.away for each in taken),
        "stage_seconds": {
            name: round(statistics.median(each.stages.get(name, 0.0) for each in taken), 3) for name in names
        },
    }


def _claims(taken: Mapping[tuple[str, str], Sequence[Answered]], load: Workload) -> list[Claim]:
    claims = []
    for workflow in load.workflows:
        ours = taken[workflow, OURS]
        static = worst_of((_ratio(taken[workflow, way], ours) for way in STATICS), "higher")
        alone = _ratio(taken[workflow, ALONE], ours)
        claims.append(claimed(f"workflow.real_vs_static_{workflow}", static, 1.3, "higher"))
        claims.append(claimed(f"workflow.real_vs_single_{workflow}", alone, 2.0, "higher"))
    return claims


def _conditions(load: Workload) -> dict[str, object]:
    return {
        "clock": "wall, medians of ratios within rounds, 90 % intervals by bootstrap",
        "rounds": load.rounds,
        "model": "the demonstration pair's larger model at both sides, its forwards padded (they sleep, not compute)",
        "forward_ms": {"device": load.forward_ms, "cloud": load.cloud_ms},
        "rtt_ms": load.rtt_ms,
        "units": {"ours and maps": UNITS, ALONE: ONE},
        "maps": {way.name: dict(way.policy.static_map or {}) for way in WAYS},
        "refined apart": [way.name for way in WAYS if way.apart and way.name != ALONE],
        "web_s": load.web_s,
        "texts of agents": f"{program.TOKENS} tokens at most; decisions scripted, one each {program.EVERY} characters",
        "load_average": os.getloadavg(),
    }
