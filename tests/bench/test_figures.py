"""docs/figures.md is what the results print."""

from __future__ import annotations

import json
import tomllib

from bench import figures


def test_the_page_and_its_plots_are_what_the_results_print() -> None:
    found = figures.files()
    for file, text in found.items():
        assert file.read_text("utf-8") == text, "python -m bench.figures"
    assert set(figures.PLOTS.glob("*.svg")) == set(found) - {figures.PAGE}


def test_every_result_stands_on_the_page_and_says_on_what_it_was_measured() -> None:
    sections = tomllib.loads((figures.HERE / "figures.toml").read_text("utf-8"))["section"]
    named = {result for section in sections for result in section["results"]}
    assert {file.stem for file in figures.PLOTS.glob("*.json")} == named
    for name in named:
        result = json.loads((figures.PLOTS / f"{name}.json").read_text("utf-8"))
        assert {"date", "cpu", "instructions", "cores"} <= set(result["conditions"])
        for claim in result["claims"]:
            low, high = claim["interval"] or (claim["value"],) * 2
            target = claim["target"]
            assert claim["holds"] == (
                target is None or (low >= target if claim["better"] == "higher" else high <= target)
            )
