"""What a parser that is taken over by its document can still reach of the disk and of other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.rag.parsing import process as process_module
from paceline.rag.parsing import sandbox
from paceline.rag.parsing.process import ParserProcess

HOSTILE = """
import ctypes, os, resource, socket, sys
from paceline.rag.parsing.readers.content import ReadText

CALLS = {}  # by number, on the architecture that has these
if os.uname().machine == "x86_64":
    CALLS = {"mount": 165, "bpf": 321, "keys": 250, "perf": 298, "faults": 323, "trace": 101, "ring": 425}
libc = ctypes.CDLL(None, use_errno=True)

def call(number):
    if libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1:
        raise PermissionError

def read(data, name):
    secret, folder, pid = data.decode().split()
    def tried(call, *arguments):
        try:
            call(*arguments)
        except OSError as error:
            return type(error).__name__
        return "allowed"
    done = {
        "read": tried(open, secret),
        "list": tried(os.listdir, folder),
        "passwords": tried(open, "/etc/passwd"),
        "write": tried(open, os.path.join(folder, "new"), "w"),
        "append": tried(open, secret, "a"),
        "empty": tried(os.truncate, secret, 0),
        "make": tried(os.mkdir, os.path.join(folder, "made")),
        "remove": tried(os.unlink, secret),
        "move": tried(os.rename, secret, secret + ".moved"),
        "temporary": tried(open, "/tmp/paceline-hostile", "w"),
        "signal": tried(os.kill, int(pid), 0),
        "socket": tried(socket.socket, socket.AF_INET),
        "mode": tried(os.chmod, secret, 0o777),
        "mode of an open file": tried(os.fchmod, os.open(os.__file__, os.O_RDONLY), 0o644),
        "owner": tried(os.chown, secret, os.getuid(), os.getgid()),
        "times": tried(os.utime, secret, (0, 0)),
        "attributes": tried(os.setxattr, secret, "user.a", b""),
        "priority": tried(os.setpriority, os.PRIO_PROCESS, int(pid), 19),
        "limits": tried(resource.prlimit, int(pid), resource.RLIMIT_NOFILE),
        "processors": tried(os.sched_setaffinity, int(pid), {0}),
        "scheduler": tried(os.sched_getscheduler, int(pid)),
        "fork": tried(os.fork),
        "program": tried(os.execv, sys.executable, [sys.executable, "-c", ""]),
        **{what: tried(call, number) for what, number in CALLS.items()},
        "library": tried(open, os.__file__),
    }
    return ReadText("", ";".join(f"{what}={how}" for what, how in done.items()))

from paceline.rag.parsing import worker
worker.reader = lambda kind: read
worker.main()
"""


@pytest.fixture(params=["with Landlock", "without Landlock"])
def hostile(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """Parser processes whose reader of text has been taken over; whether files are hidden from them."""
    without = "worker.sandbox.hide_files = lambda: False\n" if request.param == "without Landlock" else ""
    script = HOSTILE.replace("worker.main()", f"{without}worker.main()")
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[-1] == "paceline.rag.parsing.worker"
        return start([sys.executable, "-P", "-c", script], **options)

    monkeypatch.setattr(process_module.subprocess, "Popen", popen)
    return not without and sandbox.version() >= 1


def test_a_parser_that_is_taken_over_reaches_no_file_and_no_process(tmp_path: Path, hostile: bool) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret")
    with ParserProcess() as parser:
        text = parser.parse_bytes("a.txt", f"{secret} {tmp_path} {os.getpid()}".encode()).text
        without_files, without_network = parser.has_files is False, parser.has_network is False
    done = dict(each.split("=") for each in text.split(";"))
    assert done.pop("library") == "allowed", "else no library could be imported"
    refused = {"PermissionError", "OSError"}  # OSError: moving between folders, and no address family
    if os.uname().machine in sandbox._MACHINES:  # what no library needs is refused by number, whatever else is there
        assert {what for what, how in done.items() if how == "allowed"} <= {"read", "list", "passwords"}, done
    if without_network:
        assert done["socket"] in refused
    if without_files:  # the page on documents says what is left elsewhere
        assert {what for what, how in done.items() if how == "allowed"} <= {"signal", "socket"}, done
        assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.txt"]
        assert secret.read_text() == "a secret"
        assert secret.stat().st_mode & 0o777 != 0o777
    assert without_files == hostile


def test_what_a_parser_may_read_holds_no_folder_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("words")
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from paceline.rag.parsing import sandbox
        print(*sandbox.readable(), sep="\\n")
    """
    said = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True, text=True, check=True, env=process_module._environment(),
    ).stdout.split("\n")  # fmt: skip
    assert said[0].endswith("paceline")
    assert str(tmp_path) not in said
    assert "/" not in said
    assert str(Path.home()) not in said
    assert str(Path(process_module.paceline.__file__).parents[1]) not in said, "the checkout"


def test_a_kernel_without_landlock_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "version", lambda: 0)
    assert not sandbox.hide_files()
    assert Path("/etc/passwd").read_text(), "nothing was taken from this process"
