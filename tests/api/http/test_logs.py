"""Lines of the log and of the terminal, written from what strangers say."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paceline.core.printable import printable, printable_json, printable_lines

FORGED = "bye\n2026-01-01 00:00:00,000 CRITICAL paceline.node: forged\r\x1b[2K\x9b1A\u202eend\u2028"

# A program that logs as the server does, also an exception of a stranger's making.
LOGS = f"""
import logging
from paceline.api.http.logs import configure_logging

configure_logging("debug")
log = logging.getLogger("paceline.node")
log.warning("the device left an answer: %s", {FORGED!r})
try:
    raise ValueError({FORGED!r})
except ValueError:
    log.exception("a session failed")
try:
    raise RuntimeError("can't start new thread")
except RuntimeError:
    log.exception("a request failed")
# Of an answer that is broken off on purpose; the line of its request says why.
logging.getLogger("uvicorn.error").error("ASGI callable returned without completing response.")
for name in ("sse_starlette.sse", "python_multipart.multipart", "httpcore.http11", "some.package"):
    logging.getLogger(name).debug("chunk: %s", "the text of an answer")
    logging.getLogger(name).warning("something is wrong")
logging.getLogger("paceline.api").debug("of our own")
"""


def test_what_a_stranger_says_forges_no_line_of_the_log_and_no_other_package_says_there_what_an_answer_holds() -> None:
    done = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.split("\n")
    begun = [line for line in lines if line and not line.startswith("    ")]
    assert [line.split(" ")[2] for line in begun] == ["WARNING", "ERROR", "ERROR", *["WARNING"] * 4, "DEBUG"]
    assert all(line.isprintable() for line in lines)
    assert done.stderr.count("Traceback") == 1 and "a request failed: can't start new thread. No thread" in done.stderr
    assert "the text" not in done.stderr and "of our own" in done.stderr


# A program whose log nobody reads, until it has said that it goes on.
UNREAD = """
import logging, sys
from paceline.api.http import logs

logs.configure_logging("info")
logs.MAX_WAITING = 1 << 16
log = logging.getLogger("paceline.node")
for number in range(3000):
    log.info("%d %s", number, "x" * 100)
print("it goes on", flush=True)
sys.stdin.readline()
logs.END_S = 60.0
"""


def test_a_log_that_nobody_reads_holds_up_nothing_and_says_later_how_much_of_it_is_lost() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "it goes on\n"
        _, said = program.communicate("read\n", timeout=60)
    *kept, told = [line.split(": ", 1)[1] for line in said.splitlines()]
    assert [int(line.split()[0]) for line in kept] == list(range(len(kept))), "in order, and each of them whole"
    assert told == f"{3000 - len(kept)} lines of the log were lost, since nobody read them"


def test_a_text_on_one_line_has_nothing_that_moves_a_cursor() -> None:
    assert printable(FORGED).isprintable() and len(printable(FORGED)) == len(FORGED)
    assert printable("naïve 東京 🙂") == "naïve 東京 🙂"


@pytest.mark.parametrize("sign", ["\x1b", "\x9b", "\r", "\x7f", "\x00", "\u2028"])
def test_lines_and_json_for_a_terminal_control_nothing(sign: str) -> None:
    assert printable_lines(f"a{sign}\n\tb") == "a\n\tb"
    value = {"text": f"a{sign}\n\tb\u200d"}
    shown = printable_json(json.dumps(value, indent=2, ensure_ascii=False))
    assert sign not in shown and json.loads(shown) == value
