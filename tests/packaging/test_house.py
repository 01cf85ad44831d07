"""House rules that linters do not check: file sizes, imports between programs, unsafe calls, declared dependencies."""

from __future__ import annotations

import ast
import gc
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("paceline", "server", "device_agent", "client", "bench", "lab")
PROGRAMS = ("server", "device_agent", "client")
MAX_LINES = 600  # a chapter; more is a smell
MAX_CLASS_LINES = 400
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "METHODOLOGY.md"])
CLIENTS = ROOT / "tests" / "e2e" / "clients" / "requirements.txt"  # installed in another environment
NIGHTLY = CLIENTS.parent / "nightly"  # each of its scripts in an environment of its own, with a list of its own
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill"}
UNSAFE_CALLS = re.compile(r"torch\.load\(|(?<![.\w])(eval|exec)\(|trust_remote_code=True|yaml\.load\(")


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text("utf-8"))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Millions of objects, of which none is garbage before the last test: a collector would look at them for all."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


@cache
def imports(file: Path) -> frozenset[str]:
    """Top-level names of all absolute imports."""
    is_test = file.is_relative_to(ROOT / "tests")  # whose trees nothing else looks at
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8")) if is_test else parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return frozenset(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_is_short_says_what_it_is_and_loads_nothing_unsafe(package: str) -> None:
    for file in (ROOT / package).rglob("*.py"):
        text, tree = file.read_text("utf-8"), parsed(file)
        assert len(text.splitlines()) <= MAX_LINES, name(file)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        assert all((node.end_lineno or 0) - node.lineno < MAX_CLASS_LINES for node in classes), name(file)
        assert ast.get_docstring(tree), f"{name(file)} says what it is"
        assert not imports(file) & UNSAFE_MODULES, name(file)
        assert not UNSAFE_CALLS.search(text), name(file)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    """In backticks, from the root of the repository or from `paceline/`; links relative to the page."""
    text = page.read_text("utf-8")
    named = set(re.findall(r"`([a-z_][\w./]*/[\w.]*\.(?:py|md|json|toml))`", text))
    assert not {file for file in named if not any((root / file).exists() for root in (ROOT, ROOT / "paceline"))}
    linked = set(re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text))
    assert not {file for file in linked if not (page.parent / file).exists()}


def defined(file: Path) -> set[str]:
    """Names of everything that a module defines, attributes included."""
    nodes = list(ast.walk(parsed(file)))
    defs = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return defs | stored | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_comments_name_modules_that_exist() -> None:
    """In backticks: dotted names that begin with a room of the package, and paths of Python files."""
    tops = {folder.name for folder in (ROOT / "paceline").iterdir() if (folder / "__init__.py").is_file()}
    modules = {name.removeprefix("paceline."): file for name, file in modules_of("paceline", *PROGRAMS, "lab").items()}
    names = {module: defined(file) for module, file in modules.items()}
    stale: set[tuple[str, str]] = set()
    for file in modules.values():
        text = file.read_text("utf-8")
        for dotted in re.findall(r"`([a-z_]\w*(?:\.\w+)+)[`(]", text):
            parts = dotted.removeprefix("paceline.").split(".")
            known = [n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in modules]
            if parts[0] not in tops | {*PROGRAMS, "lab"} or parts[-1] in ("py", "md", "json", "toml"):
                continue
            if not known or not set(parts[known[-1] :]) <= names[".".join(parts[: known[-1]])]:
                stale.add((name(file), dotted))
        for path in re.findall(r"`([a-z_][\w./]*/[\w.]*\.py)`", text):
            here = path.split("/")[0] in tops | {*PACKAGES}
            if here and not any((root / path).exists() for root in (ROOT, ROOT / "paceline")):
                stale.add((name(file), path))
    assert not stale


def test_a_map_of_a_package_lists_every_module() -> None:
    """A docstring of `__init__` with lines `module  what it is` has one for each module and folder beside it."""
    for file in modules_of("paceline", *PROGRAMS, "lab").values():
        text = ast.get_docstring(parsed(file)) if file.name == "__init__.py" else None
        listed = set(re.findall(r"^(\w+) {2,}\S", text or "", re.MULTILINE))
        beside = [each for each in file.parent.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()]
        modules = {each.stem for each in beside if not each.stem.startswith("__")}
        assert not listed or listed - {"assets"} == modules, name(file)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_itself_relatively_and_no_other(program: str) -> None:
    for file in (ROOT / program).rglob("*.py"):
        assert not imports(file) & set(PROGRAMS), name(file)


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert imports(ROOT / "paceline" / "__init__.py") <= {"__future__"}


installed_for = cache(packages_distributions)  # it reads every distribution


def declared(*extras: str) -> set[str]:
    """Names of the distributions required by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def apart() -> set[str]:
    """Names of the distributions of the clients that tests run in another environment."""
    lines = CLIENTS.read_text("utf-8").splitlines()
    return {canonicalize_name(Requirement(line.split("#")[0]).name) for line in lines if not line.startswith("#")}


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (PACKAGES, ("bench", "chat", "documents", "gguf", "gpu", "keyring", "mcp", "otel", "postgres", "qr", "torch")),
        (("tests",), ("documents", "mcp", "postgres", "test", "torch")),
    ],
    ids=["packages", "tests"],
)
def test_every_library_that_is_imported_is_asked_for(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    installed = installed_for()
    asked = declared(*extras) | (apart() if "test" in extras else set())
    own = {*PACKAGES, "tests"} | set(sys.stdlib_module_names)
    missing = {
        (library, name(file))
        for folder in folders
        for file in (ROOT / folder).rglob("*.py")
        if file.parent != NIGHTLY
        for library in imports(file) - own
        if not {canonicalize_name(each) for each in installed.get(library, [library])} & asked
    }
    assert not missing


# Modules under `SMALL` lines that one neighbour imports, and why each is not a part of it.
SMALL = 80
APART = {"paceline.commands.doctor": "the command, which --help shows; the checks behind it import what they check"}


# Class names that two modules of the package define, and why each keeps its own.
TWICE = {
    **dict.fromkeys(
        ("Function", "Message", "Options", "Tool", "ToolCall", "ToolChoice"), "bodies, named as their APIs do"
    ),
    "Document": "a stored document; and one that a body of /v1/rerank brings",
    "Stage": "layers of a model; and a step of a workflow",
}


def modules_of(*tops: str) -> dict[str, Path]:
    """Every module by its dotted name, packages by theirs."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for top in tops
        for file in (ROOT / top).rglob("*.py")
    }


def importers(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Who imports each module."""
    found: dict[str, set[str]] = {name: set() for name in modules}
    for importer, file in modules.items():
        here = importer.split(".") if file.name == "__init__.py" else importer.split(".")[:-1]
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom):
                base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
                base = base if node.level else node.module or ""
                for name in (base, *(f"{base}.{alias.name}" for alias in node.names)):
                    found.get(name, set()).add(importer)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found.get(alias.name, set()).add(importer)
    return found


def test_what_has_one_reader_is_part_of_that_reader() -> None:
    modules = modules_of("paceline", "server", "device_agent", "client")
    small = {
        name
        for name, readers in importers(modules).items()
        if len(readers) == 1
        and modules[name].name != "__init__.py"
        and len(modules[name].read_text("utf-8").splitlines()) < SMALL
        and {reader.rpartition(".")[0] for reader in readers} == {name.rpartition(".")[0]}
    }
    assert small == set(APART)


def test_no_class_name_has_two_meanings_without_a_reason() -> None:
    found: dict[str, set[str]] = {}
    for module, file in modules_of("paceline", "server", "device_agent", "client").items():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(module)
    assert {name for name, modules in found.items() if len(modules) > 1} == set(TWICE)


def test_no_package_holds_a_single_module() -> None:
    for file in modules_of("paceline", "server", "device_agent", "client", "lab").values():
        if file.name == "__init__.py" and not any(
            each.is_dir() and each.name == "assets" for each in file.parent.iterdir()
        ):
            inside = [
                each for each in file.parent.iterdir() if each.suffix == ".py" or (each / "__init__.py").is_file()
            ]
            assert len(inside) != 2, f"{name(file.parent)} is one module"
