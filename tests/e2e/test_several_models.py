"""A linked pair that serves further models: loaded on demand, joined where the tokenizer is the link's, unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from paceline.commands.demo import configured
from tests.e2e.pair import QUESTION, Pair, running_pair

FURTHER = ("--model", "fake:3", "--model", "demo")


def models(pair: Pair) -> dict[str, dict[str, Any]]:
    listed = httpx.get(f"{pair.url('device')}/v1/models", verify=False).json()["data"]
    return {model["id"]: model["paceline"] for model in listed}


def ask(pair: Pair, model: str, **own: object) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 40,
        "temperature": 0,
        "paceline": {"report": True, **own},
    }
    return httpx.post(f"{pair.url('device')}/v1/chat/completions", json=body, timeout=60.0, verify=False)


def test_further_models_are_loaded_on_demand_and_join_the_other_side_where_they_can(tmp_path: Path) -> None:
    with running_pair(
        tmp_path, agent_flags=(*FURTHER, *configured(tmp_path, "tuning.model_idle_minutes = 0.001"))
    ) as pair:
        known = models(pair)
        assert [known[name]["state"] for name in ("fake", "fake:3", "demo")] == ["loaded", "unloaded", "unloaded"]
        assert [known[name]["joint"] for name in ("fake", "fake:3", "demo")] == [True, True, False]
        answers = {model: ask(pair, model).json() for model in ("fake", "fake:3", "fake:3:local-only", "demo")}
        strategies = {model: answer["paceline"]["strategy"] for model, answer in answers.items()}
        assert strategies == dict.fromkeys(("fake", "fake:3"), "aggregate") | dict.fromkeys(
            ("fake:3:local-only", "demo"), "lookup_tree"
        )
        told = answers["demo"]["paceline"]
        assert told["why"].startswith("the cloud is not asked: its model has another tokenizer than this one; fake ")
        assert told["degraded"] == "cloud_refused"
        texts = {model: answer["choices"][0]["message"]["content"] for model, answer in answers.items()}
        assert texts["fake"] != texts["fake:3"] and "Vel" in texts["demo"]
        assert ask(pair, "demo", on_device_loss="fail").json()["error"]["code"] == "model_writes_alone"
        while "loaded" in {known[name]["state"] for name in ("fake:3", "demo")}:
            known = models(pair)
        assert ask(pair, "fake:3").json()["choices"][0]["message"]["content"] == texts["fake:3"]
