"""Questions by task: the developer's part of FlowSpec's and EAGLE's evaluation sets, or generated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from paceline.errors import ConfigError

from ..drafting.workloads import questions

TASKS: Final = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm", "natural_questions")


def flowspec_questions(data: Path | None, count: int) -> dict[str, list[str]]:
    """First turns, at most `count` of each task. Without a folder: generated ones of Spec-Bench's kinds.

    Raises ConfigError for a folder without the files.
    """
    if data is None:
        return {task: texts[:count] for task, texts in questions(None, count).items()}
    folder = data / "flowspec_tasks" if (data / "flowspec_tasks").is_dir() else data
    texts: dict[str, list[str]] = {}
    for task in TASKS:
        file = folder / f"{task}.jsonl"
        if not file.is_file():
            raise ConfigError(f"{file} is missing: give a folder that holds FlowSpec's question sets")
        lines = file.read_text("utf-8").splitlines()[:count]
        texts[task] = [json.loads(line)["turns"][0] for line in lines]
    return texts
