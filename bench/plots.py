"""Pictures of results as SVG, and the page of a folder of results: no library draws them.

Text and lines follow the reader's colour scheme. What is too long for a picture stands in the table beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

Json = Mapping[str, Any]
Reached = tuple[str, float, float, float]  # what a claim says; its worse end, value and better end, of its aim

COLOURS = ("#2f7fb8", "#c4569a", "#3f9b63", "#c77b22", "#7d6bc0", "#8a8f98", "#b5483f", "#3aa0a0")
STYLE = """<style>text{font:12px system-ui,sans-serif;fill:#333}.axis{stroke:#999}.grid{stroke:#9994}.aim{stroke:#777}
.ok{stroke:#2e8b57;fill:#2e8b57}.no{stroke:#c0392b;fill:#c0392b}
@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"""
PAGE_STYLE = """:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-size:.9rem}td,th{padding:.2rem .6rem;border:1px solid #9996;text-align:left}
.no{color:light-dark(#a4232b,#ff9a9a)}div{overflow-x:auto}svg,img{max-width:100%;height:auto}"""
WIDTH, TEXT = 860, 6.6  # of a picture, and of a letter
LEFT, RIGHT, TOP, BOTTOM = 60.0, WIDTH - 20.0, 34.0, 300.0  # of what is drawn over axes


# ---- claims ---------------------------------------------------------------------------------------------------------
def claims(rows: Sequence[Reached]) -> str:
    """Each claim as a multiple of its aim, better to the right, with its interval; red where its worse end misses."""
    left = min(WIDTH / 2, 16 + TEXT * max(len(says) for says, *_ in rows))
    ends = [each for _, *ends in rows for each in ends]
    least, most = 0.9 * min(1.0, *ends), 1.1 * max(1.0, *ends)
    along = _scale([math.log10(least), math.log10(most)], left, RIGHT)
    bottom = 10 + 22 * len(rows)
    parts = []
    for tick in _decades(least, most):
        x = along(math.log10(tick))
        parts += [_line(x, 4, x, bottom, "aim" if tick == 1 else "grid"), _text(x, bottom + 16, f"{tick:g}", "middle")]
    for at, (says, *ends) in enumerate(rows):
        y, (worse, value, better) = 18 + 22 * at, [along(math.log10(each)) for each in ends]
        dot = f'<circle cx="{value:.1f}" cy="{y}" r="4"/>'
        parts += [_text(left - 8, y + 4, _cut(says, int((left - 16) / TEXT)), "end")]
        parts += [f'<g class="{"ok" if ends[0] >= 1 else "no"}">{_line(worse, y, better, y)}{dot}</g>']
    parts += [_text(RIGHT, bottom + 34, "multiple of the aim; right of 1 is better", "end")]
    return _svg(bottom + 40, parts)


def reached(claim: Json) -> tuple[float, float, float]:
    """(worse end, value, better end) as multiples of the aim; what is 0 counts as a thousandth of it."""
    low, high = sorted(claim["interval"] or [claim["value"]] * 2)
    aim, value = claim["target"], claim["value"]
    if claim["better"] == "higher":
        return max(low / aim, 1e-3), max(value / aim, 1e-3), max(high / aim, 1e-3)
    least = 1e-3 * aim
    return aim / max(high, least), aim / max(value, least), aim / max(low, least)


# ---- rows -----------------------------------------------------------------------------------------------------------
def lines(rows: Sequence[Json], *, x: str, ys: Sequence[str], unit: str, title: str) -> str:
    """Columns `ys` of the rows over column `x`; empty without any number."""
    courses = [[(float(row[x]), float(row[y])) for row in rows if _known(row, x, y)] for y in ys]
    points = [point for course in courses for point in course]
    if not points:
        return ""
    places = list(dict.fromkeys(each for each, _ in points))
    at_x, heights = _scale(places, LEFT, RIGHT), [y for _, y in points]
    at_y = _upward(heights)
    parts = [*_frame(title, unit, heights), _text(RIGHT, 336, x, "end")]
    parts += [_text(at_x(each), 318, f"{each:g}", "middle") for each in places]
    for number, course in enumerate(courses):
        path = " ".join(f"{at_x(each):.1f},{at_y(y):.1f}" for each, y in course)
        dots = "".join(f'<circle cx="{at_x(each):.1f}" cy="{at_y(y):.1f}" r="3"/>' for each, y in course)
        line = f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="2"/>'
        parts.append(f'<g fill="{_colour(number)}">{line}{dots}</g>')
    return _svg(372, [*parts, *_legend(ys, 360)])


def bars(rows: Sequence[Json], *, x: str, group: str, y: str, unit: str, title: str) -> str:
    """Bars of `y`: one cluster for each value of `x`, with one bar for each value of `group`; empty without rows."""
    if not rows:
        return ""
    clusters = list(dict.fromkeys(str(row[x]) for row in rows))
    groups = list(dict.fromkeys(str(row[group]) for row in rows))
    values = [float(row[y]) for row in rows]
    at_y, room = _upward(values), (RIGHT - LEFT) / len(clusters)
    wide = 0.8 * room / len(groups)
    parts = _frame(title, unit, values)
    for row, value in zip(rows, values, strict=True):
        number = groups.index(str(row[group]))
        left, top = LEFT + room * clusters.index(str(row[x])) + wide * number, at_y(value)
        box = f'x="{left:.1f}" y="{top:.1f}" width="{0.9 * wide:.1f}" height="{BOTTOM - top:.1f}"'
        told = escape(f"{row[x]}, {row[group]}: {value:g}")
        parts.append(f'<rect {box} fill="{_colour(number)}"><title>{told}</title></rect>')
    for at, name in enumerate(clusters):
        parts.append(_text(LEFT + room * (at + 0.4), 318, _cut(name, int(room / TEXT)), "middle"))
    return _svg(372, [*parts, *_legend(groups, 350)])


# ---- the page -------------------------------------------------------------------------------------------------------
def write_page(folder: Path) -> None:
    """Write `index.html` of a folder's results. Raises ConfigError where it cannot be written."""
    try:
        (folder / "index.html").write_text(page(folder), "utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}. Choose another folder.") from error


def page(folder: Path) -> str:
    """All results of a folder, each with its claims, their picture, its conditions and the picture of its rows."""
    parts = []
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text("utf-8"))
        aimed = [(claim["name"], *reached(claim)) for claim in result["claims"] if claim["target"] is not None]
        picture = claims(aimed) if aimed else ""
        own = f'<img src="{file.stem}.svg" alt="rows of {file.stem}">' if file.with_suffix(".svg").exists() else ""
        known = {name: value for name, value in result["conditions"].items() if value not in (None, [])}
        conditions = "; ".join(f"{name} {value}" for name, value in known.items())
        parts += [f"<h2>{escape(file.stem)}</h2><div>{picture}</div><div>{_table(result['claims'])}</div>{own}"]
        parts += [f"<p>Commit {escape(str(result['commit']))}. {escape(conditions)}</p>"]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Paceline: benches</title>'
    body = f"<h1>What was measured</h1>{''.join(parts)}"
    return f'<!doctype html><html lang="en">{head}<style>{PAGE_STYLE}</style>{body}</html>\n'


def _table(found: Sequence[Json]) -> str:
    rows = ["".join(f"<th>{head}</th>" for head in ("claim", "value", "interval of 90 %", "aim", "holds", "paper"))]
    for claim in found:
        spread = " to ".join(f"{each:.3g}" for each in claim["interval"] or ())
        sign = "≥" if claim["better"] == "higher" else "≤"
        aim = "none" if claim["target"] is None else f"{sign} {claim['target']:g}"
        held = "" if claim["target"] is None else "yes" if claim["holds"] else '<b class="no">no</b>'
        cells = (escape(claim["name"]), f"{claim['value']:.3g}", spread, aim, held, escape(claim["paper"] or ""))
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


# ---- parts of pictures ----------------------------------------------------------------------------------------------
def _known(row: Json, *columns: str) -> bool:
    return all(row.get(column) is not None for column in columns)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    least, most = min(values), max(values)
    return lambda value: low + (high - low) * (value - least) / ((most - least) or 1.0)


def _upward(values: Sequence[float]) -> Callable[[float], float]:
    return _scale([0.0, *values], BOTTOM, TOP)


def _decades(low: float, high: float) -> Iterator[float]:
    """The powers of ten, and so many numbers between them as there is room for."""
    steps = (1, 1.5, 2, 3, 5, 7) if high < 5 * low else (1, 2, 5) if high < 100 * low else (1,)
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (tick for step in steps if low <= (tick := step * 10.0**exponent) <= high)


def _frame(title: str, unit: str, values: Sequence[float]) -> list[str]:
    at_y, ticks = _upward(values), [max(values) * each / 4 for each in range(5)]
    grid = [_line(LEFT, at_y(tick), RIGHT, at_y(tick), "grid") for tick in ticks]
    names = [_text(LEFT - 6, at_y(tick) + 4, f"{tick:.3g}", "end") for tick in ticks]
    return [_text(LEFT, 20, f"{title}: {unit}"), *grid, *names, _line(LEFT, BOTTOM, RIGHT, BOTTOM, "axis")]


def _legend(names: Sequence[str], y: int) -> list[str]:
    parts, x = [], LEFT
    for number, name in enumerate(names):
        parts += [f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" fill="{_colour(number)}"/>']
        parts += [_text(x + 14, y, name)]
        x += 30 + TEXT * len(name)
    return parts


def _cut(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: max(1, letters - 1)]}…"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ' stroke-width="3"'
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{named}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{STYLE}{"".join(parts)}</svg>'
