"""docs/figures.md and its plots, printed from the benches' own JSON: `python -m bench.figures` (`--check`: compare).

A result is a file of docs/figures, written by `paceline bench NAME --json docs/figures/NAME.json`. `figures.toml` says
what each bench did and what each claim means; no claimed value stands there.
"""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .plots import Json, claims, reached

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGE = DOCS / "figures.md"
PLOTS = DOCS / "figures"

Measured = tuple[Json, Json]  # a claim, and the conditions of its run


def page() -> str:
    """The page as Markdown. Raises KeyError for a claim without a wording, so that none is left out."""
    words = tomllib.loads((HERE / "figures.toml").read_text("utf-8"))
    parts = ["# Figures", words["page"]["top"].strip()]
    for section in words["section"]:
        parts += [f"## {section['title']}", section["text"].strip(), "\n".join(_claims(section)), *_image(section)]
        parts += [f"![{section['title']}: {name}](figures/{file})" for name, file, _ in _drawn(section)]
        for table in section.get("table", []):
            rows = [dict(row) for row in _result(table["result"])["rows"]]
            chosen = [row for row in rows if row.pop("part", None) == table.get("part")]
            parts.append("\n".join(_table(chosen)))
    return "\n\n".join([*parts, words["page"]["end"].strip()]) + "\n"


def _result(name: str) -> Json:
    result: Json = json.loads((PLOTS / f"{name}.json").read_text("utf-8"))
    return result


def _measured(section: Json) -> dict[str, list[Measured]]:
    """By claim, in the order of the wordings: each run's value, with its conditions."""
    found: dict[str, list[Measured]] = {name: [] for name in section["says"]}
    for result in map(_result, section["results"]):
        for claim in result["claims"]:
            found[claim["name"]].append((claim, result["conditions"]))
    return found


def _claims(section: Json) -> Iterator[str]:
    yield "| | measured | aim | on |"
    yield "|---|--:|--:|---|"
    for name, runs in _measured(section).items():
        aim = runs[0][0]["target"]
        target = "none" if aim is None else f"{'at most ' if runs[0][0]['better'] == 'lower' else ''}{aim:g}"
        missed = sum(not claim["holds"] for claim, _ in runs)
        verdict = "" if aim is None or not missed else ", **missed**" if missed == len(runs) else ", **missed** in part"
        yield f"| {section['says'][name]} | {'; '.join(map(_value, runs))} | {target}{verdict} | {_on(runs)} |"


def _value(run: Measured) -> str:
    claim, _ = run
    interval = f" ({claim['interval'][0]:g} to {claim['interval'][1]:g})" if claim["interval"] else ""
    return f"{claim['value']:g}{interval}"


def _on(runs: Sequence[Measured]) -> str:
    """Processor or GPU and day of each run, with what its conditions say besides of the machine."""
    return "; ".join(dict.fromkeys(f"{_processor(conditions)}, {conditions['date']}" for _, conditions in runs))


def _processor(conditions: Json) -> str:
    extra = [name for name in ("amx_bf16", "avx512_bf16") if name in conditions["instructions"]]
    copies = [f"copies {conditions['copy_gb_s']} GB/s"] if "copy_gb_s" in conditions else []
    cloud = [f"cloud {conditions['cloud']}"] if "cloud" in conditions else []
    names = [conditions["gpu"]] if conditions.get("gpu") else [conditions["cpu"], *extra[:1]]
    return " ".join([*names, *copies, *cloud])


def _table(rows: Sequence[Json]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield f"| {' | '.join(columns)} |"
    yield f"|---|{'--:|' * (len(columns) - 1)}"
    for row in rows:
        yield f"| {' | '.join(str(row.get(column, '')) for column in columns)} |"


def _file(section: Json) -> str:
    title: str = section["title"]
    return f"{title.lower().replace(' ', '_').replace(',', '')}.svg"


def _image(section: Json) -> Iterator[str]:
    """The line that shows a section's plot, if any of its claims has an aim."""
    if any(claim["target"] is not None for runs in _measured(section).values() for claim, _ in runs):
        yield f"![{section['title']}: each claim as a multiple of its aim](figures/{_file(section)})"


def _drawn(section: Json) -> Iterator[tuple[str, str, str]]:
    """Pictures that a section asks for besides: what each is of, its file, and what stands there."""
    for name in section.get("drawn", []):
        (result,) = section["results"]
        draw: Callable[[Sequence[Json]], str] = getattr(importlib.import_module(f"bench.{result}"), f"draw_{name}")
        yield name, f"{result}_{name}.svg", draw(_result(result)["rows"]) + "\n"


def plot(section: Json) -> str:
    """Each claim with an aim as a multiple of that aim, as `plots.claims` draws them."""
    return claims(
        [
            (section["says"][name], *reached(claim))
            for name, runs in _measured(section).items()
            for claim, _ in runs
            if claim["target"] is not None
        ]
    )


def files() -> dict[Path, str]:
    """The page and the plots, with what stands in them."""
    found = {PAGE: page()}
    for section in tomllib.loads((HERE / "figures.toml").read_text("utf-8"))["section"]:
        if list(_image(section)):
            found[PLOTS / _file(section)] = plot(section) + "\n"
        found |= {PLOTS / file: text for _, file, text in _drawn(section)}
    return found


def main() -> int:
    """Write the page and the plots, or say with `--check` whether they are what the results give."""
    if "--check" in sys.argv[1:]:
        return 0 if all(file.is_file() and file.read_text("utf-8") == text for file, text in files().items()) else 1
    PLOTS.mkdir(exist_ok=True)
    for file, text in files().items():
        file.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
