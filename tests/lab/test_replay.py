"""The stimuli of a real answer, run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.replay import NotReplayableError, replayed
from paceline.core.sampling.sampler import Constraint
from paceline.runtime.stimuli import StimulusLog
from paceline.strategies.base import SIDES, Side
from tests.requests import changed
from tests.runtime.test_node import REQUEST, collect, nodes

pytestmark = pytest.mark.anyio


async def recorded(folder: Path, *, text: bool = True, **changes: object) -> dict[Side, Path]:
    """Logs of both sides, of two answers at once by the same strategy."""
    files = {side: folder / f"{side}.jsonl" for side in SIDES}
    logs = {side: StimulusLog(file, text=text) for side, file in files.items()}
    async with nodes(stimuli=logs) as (bench, tasks):
        asked = [changed(REQUEST, max_tokens=12, owner=owner, **changes) for owner in ("ann", "bob")]
        answers = [tasks.create_task(collect(await bench.device.prepare(each))) for each in asked]
        texts = {(await answer)[0] for answer in answers}
    for log in logs.values():
        log.close()
    assert len(texts) == 1, "equal seeds"
    return files


@pytest.mark.parametrize("strategy", ["aggregate", "draft_verify", "lookup_tree", "autoregressive"])
async def test_two_sessions_of_an_answer_have_the_same_effects_again(tmp_path: Path, strategy: str) -> None:
    for side, file in (await recorded(tmp_path, strategy=strategy)).items():
        told: list[str] = []
        assert replayed(file, told.append) == 0, "".join(line for line in told if "!" in line or "logged" in line)
        assert told or side == "cloud", "a device has written"
        assert file.stat().st_mode & 0o077 == 0


async def test_an_answer_under_a_constraint_is_run_again_with_its_masks(tmp_path: Path) -> None:
    yes = Constraint("json_schema", '{"enum": ["yes", "no"]}')
    for file in (await recorded(tmp_path, strategy="aggregate", constraint=yes, top_logprobs=2)).values():
        assert replayed(file, lambda _: None) == 0


async def test_another_effect_is_found(tmp_path: Path) -> None:
    file = (await recorded(tmp_path, strategy="autoregressive"))["device"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = max(number for number, line in enumerate(lines) if line.get("effects"))
    lines[last]["effects"] = lines[last]["effects"][:-1]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert replayed(file, lambda _: None) == 1


async def test_without_text_a_log_has_no_token_and_cannot_be_run_again(tmp_path: Path) -> None:
    file = (await recorded(tmp_path, text=False, strategy="aggregate"))["device"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {name for line in lines for name in line} <= {
        *("machine", "strategy", "stimulus", "event", "effects", "ticket", "now")
    }
    with pytest.raises(NotReplayableError, match="log-text"):
        replayed(file, lambda _: None)


def test_a_line_names_nothing_that_is_not_of_the_package(tmp_path: Path) -> None:
    file = tmp_path / "rogue.jsonl"
    config = {"c": "os:system"}
    file.write_text(json.dumps({"machine": 1, "strategy": "autoregressive", "config": config, "masked": False}))
    with pytest.raises(NotReplayableError, match="os:system"):
        replayed(file, lambda _: None)
