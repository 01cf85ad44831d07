"""The root of the command `paceline`: collects subcommands, prints errors as sentences and sets the exit code.

Exit codes: 0 done, 1 a requested check failed, 2 something cannot be used, 130 interrupted.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Annotated

import typer

from paceline import __version__
from paceline.commands import docs, doctor, models, tables
from paceline.commands.options import ProgramContext
from paceline.core.printable import printable_lines
from paceline.errors import AT_LIMITS, PacelineError, is_exhausted

GROUP = "paceline.commands"
BENCH = EntryPoint("bench", "paceline.bench.command:register", GROUP)  # of this distribution, too


def build(programs: tuple[EntryPoint, ...] | None = None) -> typer.Typer:
    """Build the whole command.

    A program that cannot be loaded is named on stderr, and the other commands still work, `doctor` above all.
    """
    app = typer.Typer(
        name="paceline",
        help="A device and a cloud write one answer together, behind OpenAI's API.",
        epilog="Example: paceline demo",
        no_args_is_help=True,
        rich_markup_mode=None,  # brackets in a help text are no markup
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "obj": ProgramContext()},
    )
    app.callback()(_root)
    found = tuple(entry_points(group=GROUP)) if programs is None else programs
    if not found:
        _print_error(
            "paceline is not installed, so serve, agent and chat are missing: run `pip install -e .` in the checkout"
        )
    missing = []
    for program in sorted((*found, BENCH), key=lambda entry: entry.name):
        try:
            register = program.load()
        except ModuleNotFoundError as error:
            if not program.module.startswith(error.name or "?"):
                raise  # a dependency of the program, not the program itself
            missing.append(program.name)
        else:
            register(app)
    if missing:
        _print_error(f"the commands of {' and '.join(missing)} are missing here: install paceline again")
    for builtin in (docs, models, tables, doctor):
        builtin.register(app)
    return app


def prefer_huge_pages() -> None:
    """Have torch ask Linux for huge pages for large tensors, unless the environment says otherwise. Before its first
    tensor: it looks then. A step's logits are 300 kB a row and new in each step, most of whose cost was small pages."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    # Python's own handler would be replaced by asyncio's, which waits for what holds its loop up: a model being loaded.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if sys.getfilesystemencoding() == "ascii":  # for whoever turned Python's UTF-8 mode off where the locale has none
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # what is none is refused where it is used
    prefer_huge_pages()
    gc.set_threshold(10_000)  # a fifth of the time in which modules are loaded went into looking for garbage
    code = 0
    try:
        build()()
    except KeyboardInterrupt:
        code = 130
    except Exception as raised:
        error = raised
        while isinstance(error, ExceptionGroup):  # of tasks, of which the first to fail ended the others
            error = error.exceptions[0]
        if is_exhausted(error):
            _print_error(AT_LIMITS)
        elif isinstance(error, PacelineError | OSError):  # a disk that is full or read-only, too, needs no traceback
            _print_error(str(error))
        else:
            raise
        code = 2
    finally:
        _give_up_full_output()
    sys.exit(code)


def _give_up_full_output() -> None:
    """Close a standard output that takes no more: Python would try again at its end, and make the exit code 120."""
    try:
        if sys.stdout is not None:  # as it is where the shell has closed it
            sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            sys.stdout.close()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")]


def _root(version: Version = False) -> None:  # noqa: ARG001  # handled by its callback
    return


def _print_error(sentence: str) -> None:
    typer.echo(f"paceline: {printable_lines(sentence)}", err=True)
