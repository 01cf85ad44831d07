"""Every scenario of the table has a module that tries it, or a reason why none does; every closed hole has its test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.reliability.report import MODULE
from tests.reliability.scenarios import SCENARIOS, UNTESTED, name

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
SECURITY = ROOT / "docs" / "security.md"
LAST = 34


def modules() -> Counter[int]:
    """Number of modules by scenario."""
    found = (MODULE.search(f"/{path.name}") for path in FOLDER.glob("test_r*.py"))
    return Counter(int(match[1]) for match in found if match is not None)


def test_every_scenario_has_a_module_or_a_reason() -> None:
    assert list(SCENARIOS) == list(range(1, LAST + 1))
    neither = [name(number) for number in SCENARIOS if number not in modules() and number not in UNTESTED]
    assert not neither, f"neither tested nor said why not: {', '.join(neither)}"


def test_every_closed_hole_names_tests_that_exist() -> None:
    section = SECURITY.read_text().split("## Holes that were closed")[1].split("\n## ")[0]
    holes = [line for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(line.split("|")[1]) for line in holes] == list(range(1, len(holes) + 1))
    for hole in holes:
        *_, held, _ = hole.split("|")
        module = ""
        named = re.findall(r"`([\w/]*\.py)?(?:::(\w+))?`|\bR(\d+)", held)
        assert named, hole
        for path, function, scenario in named:
            if scenario:
                assert int(scenario) in modules(), hole
                continue
            module = path or module
            text = (ROOT / module).read_text()
            assert not function or f"def {function}(" in text, f"{module}::{function}"
