"""The part of `bench aggregate` with 151,936 ids: 1, 4 and 16 joint answers at a time, on real processes.

Each side runs a random model of one small layer, written as a folder, with forwards padded to a given time: what it
costs to sample, to send and to fuse distributions of so many ids is real. The device's model is the cloud's with noise
in its output, so that some drafts are rejected; `acceptance_cloud` says how many are not.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.baselines.dragon import shaped
from paceline.commands.demo import Children, Pair, configured, start_pair
from paceline.core.side import SIDES, Side

from .aggregation.process_pair import DEVICE, DOCUMENTS
from .bootstrap import Estimate, ratio_of, worst_of
from .findings import Findings, claimed
from .random_model import Shape
from .serving.model_files import ModelFiles
from .streamed_answer import Answer, Asked

SHAPE: Final = Shape(layers=1, hidden=128, inner=256, heads=4, kv_heads=2, positions=4096, small=True, tied=False)
NOISE: Final = 0.08  # of the device's output weights, by their own deviation
FORWARD_S: Final = 0.03
ROW_S: Final = 0.0003
AT_ONCE: Final = (1, 4, 16)
LEVELS: Final = ("open", "document-private")
MODEL: Final = "wide"
TREE, TOKEN_WISE, ALONE = "tree", "token-wise", "device only, lookup_tree"


@dataclass(frozen=True, slots=True)
class Load:
    tokens: int = 32
    rounds: int = 5
    at_once: tuple[int, ...] = AT_ONCE
    trip: float = 0.3  # s
    shape: Shape = SHAPE


QUICK: Final = Load(tokens=12, rounds=1, at_once=(1, 4))


def measure(load: Load) -> Findings:
    """A row for each way and number of answers at a time; claims over the worse privacy level."""
    ways: dict[str, Mapping[str, object]] = {ALONE: {"strategy": "lookup_tree"}}
    for level in LEVELS:
        joint = {"strategy": "aggregate", "privacy": level}
        ways[f"{TREE}, {level}"] = joint | shaped("tree", aggregator="mixture")
        ways[f"{TOKEN_WISE}, {level}"] = joint | shaped("none", aggregator="mixture")
    found = Findings()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory, _pair(Path(directory), load) as pair:
        asked = Asked(MODEL, load.tokens)
        for number in load.at_once:
            taken: dict[str, list[list[Answer]]] = {way: [] for way in ways}
            for round_index in range(load.rounds + 1):
                seeds = [10_000 * number + 100 * round_index + i for i in range(number)]
                for way, how in ways.items():
                    answers = asked.answers(pair.device.url, how, seeds)
                    if round_index:  # the first round calibrates both sides
                        taken[way].append(answers)
            _report(found, number, taken)
    return found


@contextmanager
def _pair(folder: Path, load: Load) -> Iterator[Pair]:
    pace = f"forward={1e3 * FORWARD_S:g}ms,row={1e3 * ROW_S:g}ms"
    emulate: dict[Side, str] = {"cloud": pace, "device": f"rtt={1e3 * load.trip:g}ms,{pace}"}
    models: dict[Side, str] = {}
    documents: dict[Side, Path] = {}
    for side in SIDES:
        model = ModelFiles.write(folder / f"{side} model", load.shape, noise=NOISE if side == "device" else 0.0)
        models[side] = str(model.directory)
        documents[side] = folder / f"{side}.md"
        documents[side].write_text(DOCUMENTS[side])
    with Children(folder) as children:
        yield start_pair(
            children,
            documents,
            model=models,
            embedder="hash",
            device=DEVICE,
            flags=("--name", MODEL, "--debug-options"),
            side_flags={
                side: configured(folder, "tuning.threads = 1", f"tuning.emulate = {emulate[side]!r}") for side in SIDES
            },
        )


def _report(found: Findings, number: int, taken: Mapping[str, Sequence[Sequence[Answer]]]) -> None:
    seconds = {way: [_per_token(answers) for answers in rounds] for way, rounds in taken.items()}
    for way, rounds in taken.items():
        against = ratio_of(seconds[way], seconds[ALONE])
        found.rows.append(
            {
                "way": f"152k ids, {way}",
                "at_once": number,
                "s_per_token": statistics.median(seconds[way]),
                "lowest": min(seconds[way]),
                "highest": max(seconds[way]),
                "vs_device_default": against.value,
                "interval_90": against.interval,
                "acceptance_cloud": _accepted(rounds),
            }
        )

    def worst(to: Mapping[str, str]) -> Estimate:
        return worst_of((ratio_of(seconds[f"{TREE}, {level}"], seconds[to[level]]) for level in LEVELS), "lower")

    token_wise = {level: f"{TOKEN_WISE}, {level}" for level in LEVELS}
    found.claim(claimed(f"aggregate.wide_vs_token_wise_{number}", worst(token_wise), 0.25, "lower"))
    alone = worst(dict.fromkeys(LEVELS, ALONE))
    found.claim(claimed(f"aggregate.wide_vs_device_default_{number}", alone, 2.0, "lower"))


def _per_token(answers: Sequence[Answer]) -> float:
    return statistics.median(answer.per_token for answer in answers)


def _accepted(rounds: Sequence[Sequence[Answer]]) -> float | None:
    stats = [answer.stats for answers in rounds for answer in answers]
    drafted = sum(each.get("drafted_cloud", 0.0) for each in stats)
    return sum(each.get("accepted_cloud", 0.0) for each in stats) / drafted if drafted else None
