"""The program without what Linux alone has: each thing taken away, and everything that is not there on Windows."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from paceline import secret_files, system
from paceline.commands import diagnosis
from paceline.errors import DocumentError, ParserLost
from paceline.rag.parsing import process
from paceline.rag.parsing.folders import find_files, open_file
from paceline.rag.parsing.kinds import Limits
from paceline.rag.parsing.process import ParserProcess, memory_file


class Times(NamedTuple):
    user: float
    idle: float
    iowait: float


# Refused to paceline's own modules; Python's and those of libraries have their own ways.
_LIKE_WINDOWS = """
import builtins, os, signal, socket, sys, select
ABSENT = {"fcntl", "grp", "pwd", "resource", "termios"}
imported = builtins.__import__

def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    if name in ABSENT and (globals or {}).get("__name__", "").startswith("paceline"):
        raise ImportError(f"no {name} on this system")
    return imported(name, globals, locals, fromlist, level)

builtins.__import__ = guarded
import paceline.server.commands, paceline.device_agent.commands, paceline.bootstrap, paceline.client.commands
import paceline.rag.parsing.worker, paceline.runtime.stages.stage_server, paceline.api.http.server
from pathlib import Path
from paceline import secret_files, system

assert not system.HAS_USERS
folder = Path(sys.argv[1], "state")
secret_files.private_folder(folder)
assert secret_files.write_private(folder / "key", b"secret")
assert secret_files.read_private(folder / "key", otherwise="") == b"secret"
print(len(system.missing()))
"""


def test_every_program_imports_without_the_modules_that_windows_lacks(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LIKE_WINDOWS, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) == 2


@pytest.fixture
def no_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "HAS_USERS", False)


@pytest.mark.usefixtures("no_users")
def test_without_owners_and_modes_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    status = tmp_path.stat()
    assert not system.is_others(status) and not system.open_mode(status)
    secret_files.private_folder(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o777
    assert secret_files.write_private(tmp_path / "key", b"secret")


@pytest.mark.usefixtures("no_users")
def test_without_locks_and_limits_each_question_has_an_answer(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb") as one, (tmp_path / "lock").open("wb") as other:
        assert system.lock(one.fileno(), alone=True) and system.lock(other.fileno(), alone=True)
    assert system.open_files() is None and system.raise_open_files(64) is None
    status, text = diagnosis.system()
    assert status == "warn" and "do not notice each other" in text


def test_here_a_lock_is_noticed_and_nothing_is_missing(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("wb") as one, (tmp_path / "lock").open("wb") as other:
        assert system.lock(one.fileno(), alone=True)
        assert not system.lock(other.fileno(), alone=True)
        assert system.lock(one.fileno(), alone=False) and system.lock(other.fileno(), alone=False)
    assert diagnosis.system()[0] == "ok"


class Container:
    """Control groups of a machine with 64 cores and 64,000 bytes, of which 50,000 are free."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        patch.setattr(system, "OWN_GROUPS", folder / "own")
        patch.setattr(system, "GROUPS", folder / "groups")
        patch.setattr(system, "cores", lambda: frozenset(range(64)))
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=50_000, total=64_000))

    def have(self, own: str, files: Mapping[str, str]) -> None:
        (self._folder / "own").write_text(own)
        for name, content in files.items():
            (self._folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / "groups" / name).write_text(content)


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    return Container(tmp_path, monkeypatch)


INSIDE = "4:memory:/docker/4f\n3:cpu,cpuacct:/docker/4f"  # its root is here, under the name that it has outside


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/pod/one", {"pod/one/cpu.max": "max 100000", "pod/cpu.max": "150000 50000"}, 3),
        ("0::/../elsewhere", {"cpu.max": "50000 100000"}, 1),
        (INSIDE, {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (INSIDE, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {}, 64),
        ("", {}, 64),
    ],
)
def test_a_container_s_limit_on_time_is_one_on_cores(
    own: str, files: dict[str, str], usable: int, container: Container
) -> None:
    container.have(own, files)
    assert system.usable_cores() == usable


LIMIT, USED = "memory.max", "memory.current"
LIMIT_1, USED_1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"  # of version 1


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        (
            "0::/",
            {LIMIT: "9000", USED: "4000", "memory.stat": "anon 7\ninactive_file 9\nactive_file 6"},
            (5015, 9000),
        ),
        (
            "0::/a/b",
            {f"a/b/{LIMIT}": "9000", f"a/b/{USED}": "1", f"a/{LIMIT}": "8000", f"a/{USED}": "7000"},
            (1000, 8000),
        ),
        (
            "0::/a/b",
            {f"a/b/{LIMIT}": "8000", f"a/b/{USED}": "1", f"a/{LIMIT}": "9000", f"a/{USED}": "8900"},
            (100, 8000),
        ),
        (INSIDE, {LIMIT_1: "9000\n", USED_1: "9500\n", "memory/memory.stat": "total_inactive_file 300\n"}, (0, 9000)),
        (INSIDE, {LIMIT_1: "9223372036854771712", USED_1: "1"}, (50_000, 64_000)),
        ("0::/", {LIMIT: "max", USED: "4000"}, (50_000, 64_000)),
        ("0::/", {LIMIT: "60000", USED: "100"}, (50_000, 60_000)),
        ("", {}, (50_000, 64_000)),
    ],
)
def test_a_container_s_limit_on_memory_counts_as_the_machine_s(
    own: str, files: dict[str, str], usable: tuple[int, int], container: Container
) -> None:
    container.have(own, files)
    assert system.usable_memory() == usable


def test_cores_on_which_others_compute_are_not_free_until_they_have_been_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process may use four cores of five, and computes on one and a half itself."""
    now, others = 0.0, 0.0

    def times(percpu: bool) -> list[Times]:
        assert percpu
        used = (now * 1.5 + others) / 4
        return [Times(used, now - used, 9.0), *[Times(used, now - used, 0.0)] * 3, Times(now, 0.0, 0.0)]

    monkeypatch.setattr(psutil, "cpu_times", times)
    monkeypatch.setattr(system, "monotonic", lambda: now)
    monkeypatch.setattr(system, "process_time", lambda: 1.5 * now)
    monkeypatch.setattr(system, "cores", lambda _: frozenset(range(4)))
    free = system._FreeCores()
    found = []
    for load in (0.0, 0.5, 1.0, 2.7, 2.7, 0.0, 0.0, 0.0, 0.0, 4.0):
        now += 0.25
        others += load * 0.25
        found.append(free.count())
        others += 4.0  # too soon to be seen
        assert free.count() == found[-1]
        others -= 4.0
    assert found == [4, 4, 3, 1, 1, 2, 3, 4, 4, 1]


def test_where_the_processor_s_times_are_hidden_all_cores_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(**_: bool) -> object:
        raise PermissionError(13, "hidden")

    monkeypatch.setattr(psutil, "cpu_times", hidden)
    assert system._FreeCores().count() == len(system.cores())


def test_without_proc_nothing_is_known_of_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "CPU_INFO", tmp_path / "absent")
    assert not system.processor_flags()


# ---- threads --------------------------------------------------------------------------------------------------------
def test_work_waits_for_the_threads_there_are_where_the_system_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    go = threading.Event()
    with system.Threads(2, "work") as threads:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            threads.submit(go.wait)
            waiting = [threads.submit(threading.get_ident) for _ in range(9)]
            go.set()
            assert {each.result() for each in waiting} != {threading.get_ident()}
        both = threading.Barrier(2)  # has two threads when the system gives them again
        for met in [threads.submit(both.wait, 60.0) for _ in range(2)]:
            met.result()
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start"):  # when the program starts, not when it is asked something
        system.Threads(2, "work")


# ---- documents ------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["fork", "send_fds"])
def one_process_each(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr({"fork": os, "send_fds": socket}[request.param], request.param)
    assert not process.can_fork()


@pytest.mark.usefixtures("one_process_each")
def test_without_fork_each_document_has_a_process(caplog: pytest.LogCaptureFixture) -> None:
    with ParserProcess() as parser:
        for title in ("One", "Two"):
            read = parser.parse_bytes("page.md", f"# {title}\n\na bicycle race".encode())
            assert (read.title, "a bicycle race" in read.text) == (title, True)
        assert parser.cpu_s > 0.0
        with pytest.raises(DocumentError, match="damaged"):
            parser.parse_bytes("book.epub", b"PK\x03\x04" + bytes(64))
    assert caplog.text.count("without access to the network") == 1


def test_without_fork_a_document_is_ended_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    monkeypatch.setattr(process, "_START_S", 0.0)
    with ParserProcess(Limits(wall_s=0)) as parser, pytest.raises(DocumentError, match="takes too long"):
        parser.parse_bytes("page.md", b"a bicycle race")


def test_without_fork_a_killed_parser_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    parser = ParserProcess()
    parser.kill()
    with pytest.raises(ParserLost):
        parser.parse_bytes("page.md", b"a bicycle race")


def test_without_files_in_memory_bytes_are_read_from_a_temporary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with memory_file(b"a bicycle race") as document:
        document.seek(0)
        assert document.read() == b"a bicycle race"


def test_without_folder_descriptors_an_exchanged_file_is_still_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", set())
    file = tmp_path / "page.md"
    file.write_text("a bicycle race")
    ((found,), _) = find_files([tmp_path])
    with open_file(found) as stream:
        assert stream.read() == b"a bicycle race"
    file.rename(tmp_path / "kept.md")
    file.write_text("another text")
    with pytest.raises(DocumentError, match="exchanged"):
        open_file(found)
