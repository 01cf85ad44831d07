"""Every scenario of the table has a module that tries it, or a reason why none does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.reliability.report import MODULE
from tests.reliability.scenarios import EXHAUSTIVE, SCENARIOS, UNTESTED, name

FOLDER = Path(__file__).parent
LAST = 34


def modules() -> Counter[int]:
    """Number of modules by scenario."""
    found = (MODULE.search(f"/{path.name}") for path in FOLDER.glob("test_r*.py"))
    return Counter(int(match[1]) for match in found if match is not None)


def test_every_scenario_has_a_module_or_a_reason() -> None:
    assert list(SCENARIOS) == list(range(1, LAST + 1))
    neither = [name(number) for number in SCENARIOS if number not in modules() and number not in UNTESTED]
    assert not neither, f"neither tested nor said why not: {', '.join(neither)}"


def test_every_module_has_a_nightly_size_or_tries_all_there_is() -> None:
    short_only = {
        path.name
        for path in FOLDER.glob("test_r*.py")
        if (match := MODULE.search(f"/{path.name}")) is not None
        and int(match[1]) not in EXHAUSTIVE
        and "size(" not in path.read_text()
    }
    assert not short_only


def test_no_module_is_of_no_scenario_and_no_reason_is_out_of_date() -> None:
    assert not set(modules()) - set(SCENARIOS)
    assert not set(modules()) & set(UNTESTED), "they are tested now"
    assert all(UNTESTED.values())
