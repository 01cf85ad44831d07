"""pytest plugin behind `scripts/reliability`: its options, and the table of scenarios with their figures.

Scenarios that compare with a calm run can be run apart from the others, alone; the table is printed by the last run.
"""

from __future__ import annotations

import json
import re
import resource
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.scenarios import MEASURED, SCENARIOS, UNTESTED, name

MODULE = re.compile(r"/test_r(\d\d)_")
PROCESSOR_S = pytest.StashKey[Counter[int | None]]()


@dataclass(slots=True)
class Row:
    outcomes: set[str] = field(default_factory=set)
    figures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        if "failed" in self.outcomes:
            return "broken"
        return "held" if all(map(met, self.figures)) else "figure missed"


def met(figure: dict[str, Any]) -> bool:
    value, at_most, at_least = figure["value"], figure["at_most"], figure["at_least"]
    return (at_most is None or value <= at_most) and (at_least is None or value >= at_least)


def shown(figure: dict[str, Any]) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    asked = [
        f"{sign} {figure[key]:g}" for sign, key in (("<=", "at_most"), (">=", "at_least")) if figure[key] is not None
    ]
    wanted = f" ({', '.join(asked)})" if asked else ""
    return f"{figure['what']}: {figure['value']:.4g}{unit}{wanted}{'' if met(figure) else '  MISSED'}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reliability")
    group.addoption("--nightly", action="store_true", help="the nightly sizes: hours")
    group.addoption("--seed", type=int, default=1, help="seed of every random choice")
    group.addoption("--measured", choices=("only", "none"), help="those that compare with a calm run, or the others")
    group.addoption("--keep-table", type=Path, help="write the table into this file instead of printing it")
    group.addoption("--add-table", type=Path, help="print what an earlier run has written there, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (measured := config.getoption("measured")) is None:
        return
    chosen = [item for item in items if (_scenario(item.nodeid) in MEASURED) == (measured == "only")]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist tells the run's own process what its tests have used."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["processor_s"] = dict(session.config.stash.get(PROCESSOR_S, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(PROCESSOR_S, Counter()).update(node.workeroutput.get("processor_s", {}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count the processor time of a test. A process that several share is counted where the last of them ends it."""
    before = _processor_s()
    try:
        return (yield)
    finally:
        item.config.stash.setdefault(PROCESSOR_S, Counter())[_scenario(item.nodeid)] += _processor_s() - before


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _scenario(node_id: str) -> int | None:
    """Number of the scenario that a test is of; None: of none."""
    match = MODULE.search(node_id)
    return None if match is None else int(match[1])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows: dict[int, Row] = defaultdict(Row)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if not isinstance(report, pytest.TestReport | pytest.CollectReport):
                continue  # warnings, and tests left out by -k
            if (scenario := _scenario(report.nodeid)) is None:
                continue
            row = rows[scenario]
            row.seconds += getattr(report, "duration", 0.0)
            row.outcomes.add(report.outcome)
            if isinstance(report, pytest.TestReport) and report.when == "call":
                row.figures += [value for key, value in report.user_properties if key == "figure"]
    processor_s = config.stash.get(PROCESSOR_S, Counter())
    if (kept := config.getoption("keep_table")) is not None:
        kept.write_text(json.dumps([_plain(rows), [*processor_s.items()]]))
        return
    if (added := config.getoption("add_table")) is not None and (text := added.read_text()):
        earlier, used = json.loads(text)
        rows |= {number: Row(set(outcomes), figures, seconds) for number, outcomes, figures, seconds in earlier}
        processor_s += Counter(dict(used))
    _print_table(terminalreporter.write_line, config, rows, processor_s)


def _plain(rows: dict[int, Row]) -> list[tuple[int, list[str], list[dict[str, Any]], float]]:
    return [(number, [*row.outcomes], row.figures, row.seconds) for number, row in rows.items()]


def _print_table(
    write: Callable[[str], None], config: pytest.Config, rows: dict[int, Row], processor_s: Counter[int | None]
) -> None:
    write("")
    write(
        f"seed {config.getoption('seed')}, {'nightly' if config.getoption('nightly') else 'short'} sizes, "
        f"{sum(processor_s.values()):.1f} s of processor time, {processor_s[None]:.1f} of them in tests of no scenario"
    )
    for scenario, row in sorted(rows.items()):
        took = f"{row.seconds:6.0f} s {processor_s[scenario]:5.1f} s CPU"
        write(f"{name(scenario):4} {row.verdict:14} {took}  {SCENARIOS[scenario]}")
        for figure in row.figures:
            write(f"       {shown(figure)}")
    for scenario, why in UNTESTED.items():
        write(f"{name(scenario):4} not tested here: {why}")
