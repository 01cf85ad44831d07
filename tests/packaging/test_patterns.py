"""Regular expressions of the package: none may backtrack over a text that others wrote.

`re` holds the interpreter's lock while it matches, so a pattern that tries each way to divide a run of characters stops
the whole process. Two shapes do: an unbounded repeat within another, and two next to each other that accept the same
character. A search has an invisible third: it begins anew at each character of a run that a later part refuses.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # the parser of `re` itself: no other reads all it does
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
SEARCHES = {"search", "sub", "subn", "split", "findall", "finditer"}
# By module and pattern or name: why it may stay although its shape is that of one which backtracks.
ALLOWED = {
    ("paceline/engine/stage.py", "LAYER"): "names of weights, each of whose parts ends with a full stop",
    **{
        ("paceline/engine/reader/question.py", pattern): "of a question of at most MAX_CHARACTERS"
        for pattern in ("_LISTED", "_WISHED", "_SHARED", "_SUBJECT")
    },
    (
        "paceline/api/chat/tools.py",
        "''.join(atoms) + before",
    ): "literals of the table of formats, a name, and runs of space that no space follows",
    (
        "paceline/api/chat/tools.py",
        "reduce(lambda rest, atom: f'{atom}(?:{rest})?', reversed(atoms), '')",
    ): "likewise, of at most _MAX_FRAME characters",
}
EVERY = frozenset(range(0x250)) | {-1}  # characters one by one, and one that stands for all others
SAMPLES = [chr(code) for code in sorted(EVERY - {-1})]


def accepted(node: Any) -> frozenset[int]:
    """The characters that one item of a pattern may begin with or, where it repeats one, consists of."""
    if node[0] not in (codes.LITERAL, codes.NOT_LITERAL, codes.IN, codes.ANY):
        return EVERY
    return matched(unparsed(patterns.SubPattern(patterns.State(), [node])))


@cache
def matched(pattern: str) -> frozenset[int]:
    matches = re.compile(pattern, re.DOTALL | re.IGNORECASE).match
    found = {ord(sample) for sample in SAMPLES if matches(sample)}
    return frozenset(found | ({-1} if matches("\u4e00") else set()))


def unparsed(item: Any) -> str:
    """One character or class as a pattern."""
    ((code, value),) = item
    if code is codes.ANY:
        return "."
    if code is codes.LITERAL:
        return re.escape(chr(value))
    if code is codes.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    parts = []
    for kind, content in value:
        if kind is codes.NEGATE:
            parts.insert(0, "^")
        elif kind is codes.LITERAL:
            parts.append(re.escape(chr(content)))
        elif kind is codes.RANGE:
            parts.append(f"{re.escape(chr(content[0]))}-{re.escape(chr(content[1]))}")
        else:
            names = {codes.CATEGORY_DIGIT: "d", codes.CATEGORY_NOT_DIGIT: "D", codes.CATEGORY_SPACE: "s"}
            names |= {codes.CATEGORY_NOT_SPACE: "S", codes.CATEGORY_WORD: "w", codes.CATEGORY_NOT_WORD: "W"}
            parts.append(f"\\{names[content]}")
    return f"[{''.join(parts)}]"


def characters(items: Any) -> frozenset[int]:
    """All that a sub-pattern may consist of."""
    found: frozenset[int] = frozenset()
    for code, value in items:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            found |= characters(value[2])
        elif code is codes.SUBPATTERN:
            found |= characters(value[3])
        elif code is codes.BRANCH:
            found |= frozenset[int]().union(*(characters(branch) for branch in value[1]))
        elif code not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
            found |= accepted((code, value))
    return found


def faults(items: Any, open_repeat: frozenset[int], within: bool) -> tuple[list[str], frozenset[int]]:
    """Faults of a sequence, and what an unbounded repeat at its end accepts.

    open_repeat: what one that ends directly before accepts; within: True inside an unbounded repeat.
    """
    found: list[str] = []
    for code, value in items:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inner = value
            unbounded = most is codes.MAXREPEAT
            if unbounded and within:
                found.append("an unbounded repeat within another")
            own = characters(inner)
            if unbounded and own & open_repeat:
                found.append("two unbounded repeats of the same characters next to each other")
            more, _ = faults(inner, frozenset(), within or unbounded)
            found += more
            if unbounded:
                open_repeat = own | (open_repeat if least == 0 else frozenset())
            elif least:
                open_repeat = open_repeat & own
        elif code is codes.SUBPATTERN:
            more, open_repeat = faults(value[3], open_repeat, within)
            found += more
        elif code is codes.BRANCH:
            ends = [faults(branch, open_repeat, within) for branch in value[1]]
            found += [fault for more, _ in ends for fault in more]
            open_repeat = frozenset[int]().union(*(end for _, end in ends))
        elif code not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
            open_repeat = open_repeat & accepted((code, value))  # what it takes, the repeat could give back
    return found, open_repeat


def begins_anew(items: Any) -> bool:
    """True where a search would try again from each character of a run: a first unbounded repeat and more after it."""
    first, *rest = items
    while first[0] is codes.SUBPATTERN:
        first, *inner = first[1][3]
        rest = [*inner, *rest]
    if first[0] is codes.BRANCH:
        return any(begins_anew([*branch, *rest]) for branch in first[1][1] if len(branch))
    return first[0] in (codes.MAX_REPEAT, codes.MIN_REPEAT) and first[1][1] is codes.MAXREPEAT and bool(rest)


def faults_of(pattern: str | bytes, flags: int, function: str) -> list[str]:
    if function == "unknown":
        return ["a pattern made at run time"]
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    items = patterns.parse(text, flags & ~re.DEBUG & ~(re.UNICODE if isinstance(pattern, bytes) else 0))
    found, _ = faults(items, frozenset(), False)
    if function in SEARCHES and len(items) and begins_anew(items):
        found.append("a search that begins with an unbounded repeat and goes on")
    return found


def uses(file: Path) -> Iterator[tuple[str, str, str | bytes, int]]:
    """(name or pattern, function, pattern, flags) of each regular expression in a module.

    A pattern that is put together when the module runs is found by the name that it is given.
    """
    tree = ast.parse(file.read_text("utf-8"))
    methods: dict[str, set[str]] = {}  # of named patterns
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            methods.setdefault(node.value.id, set()).add(node.attr)
    compiled: dict[int, str] = {}
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                compiled |= {id(part): name for part in ast.walk(value)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=function)) if function in FUNCTIONS:
                pass
            case _:
                continue
        if id(node) in compiled:
            name = compiled[id(node)]
            for pattern in patterns_in(getattr(importlib.import_module(module_of(file)), name)):
                for method in (methods.get(name, set()) & FUNCTIONS) or {"search"}:
                    yield name, method, pattern.pattern, pattern.flags
        elif isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value), function, node.args[0].value, 0
        else:
            yield ast.unparse(node.args[0]), "unknown", "", 0


def patterns_in(value: object) -> Iterator[re.Pattern[Any]]:
    """Those of a table, or the one that the value is."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        yield from patterns_in((*value.keys(), *value.values()))
    elif isinstance(value, tuple | list | frozenset):
        for each in value:
            yield from patterns_in(each)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


FILES = [
    file
    for package in ("paceline", "server", "device_agent", "client")
    for file in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"\bre\.(" + "|".join(FUNCTIONS) + r")\(", file.read_text("utf-8"))
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_pattern_backtracks_over_what_others_wrote(file: Path) -> None:
    path = file.relative_to(ROOT).as_posix()
    if path.startswith(("lab/training/", "paceline/bench/")):
        return  # not part of a server
    for name, function, pattern, flags in uses(file):
        found = faults_of(pattern, flags, function)
        assert not found or (path, name) in ALLOWED, (name, found)


@pytest.mark.parametrize("key", ALLOWED, ids=str)
def test_an_exception_is_still_needed(key: tuple[str, str]) -> None:
    path, name = key
    found = [
        faults_of(pattern, flags, function) for known, function, pattern, flags in uses(ROOT / path) if known == name
    ]
    assert any(found), "it is none"


@pytest.mark.parametrize(
    ("pattern", "function", "is_fault"),
    [
        (r"#{1,6}[ \t]+(.+?)[ \t]*#*", "match", True),  # a heading, as it was once read here
        (r"(a+)+", "match", True),
        (r"(\w+\s?)*", "match", True),
        (r"\s*\w*\s*x", "match", True),
        (r"\d+\.?\d+", "match", True),
        (r"\s+$", "search", True),
        (r"(x|\s+)y", "sub", True),
        (r"\s+$", "match", False),
        (r"\s+", "sub", False),
        (r"[a-z]+\d+", "match", False),
        (r"[a-z]+,[a-z]+", "match", False),
        (r"[ \t]*(```|~~~)", "match", False),
        (r"[a-z]{1,40}[a-z]{1,40}", "match", False),
    ],
)
def test_the_rule_finds_what_backtracks(pattern: str, function: str, is_fault: bool) -> None:
    assert bool(faults_of(pattern, 0, function)) == is_fault
