"""The parser process from outside: what it loads and may do, and what becomes of a document when it is killed."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import psutil
import pytest

from paceline.errors import DocumentError, ParserLost, RequestError
from paceline.rag.parsing import process as process_module
from paceline.rag.parsing.folders import FoundFile, read_files
from paceline.rag.parsing.kinds import MAX_REASON, SUFFIXES, Limits
from paceline.rag.parsing.process import (
    BUDGET_S,
    WINDOW_S,
    ParserBudget,
    ParserPool,
    ParserProcess,
    memory_file,
    plain_text,
)
from paceline.rag.parsing.readers import READERS, content, reader
from tests.clocks import read_from
from tests.rag.parsing.made import ENDLESS

IMPORTED = """
import sys, paceline.rag.parsing.worker, python_calamine
for kind in paceline.rag.parsing.readers.READERS:
    paceline.rag.parsing.readers.reader(kind)
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_a_parser_loads_neither_models_nor_arrays() -> None:
    """Every reader imported, as in a process that has met every kind."""
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=process_module._environment())
    names = set(done.stdout.split())
    assert {"pypdfium2", "python_calamine", "lxml"} <= names
    assert not names & {"torch", "numpy", "transformers", "fastapi", "sqlite3", "asyncio"}
    assert set(SUFFIXES.values()) == set(READERS)


def child_of(parser: ParserProcess) -> psutil.Process:
    """The process that parses a document, as soon as there is one."""
    while parser.pid is None:
        pass
    return child_below(parser.pid)


def child_below(pid: int) -> psutil.Process:
    while not (children := psutil.Process(pid).children()):
        pass
    return children[0]


def parsing(parser: ParserProcess, path: Path) -> tuple[threading.Thread, list[BaseException]]:
    """Parse a file on a thread that keeps the errors."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with path.open("rb") as document:
                parser.parse("endless.rtf", document)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    path = tmp_path / "endless.rtf"
    path.write_bytes(ENDLESS)
    return path


LIBRARIES = {"lxml": ("html", "docx", "pptx", "odt", "epub"), "pypdfium2": ("pdf",)}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_kind_whose_library_is_not_installed_names_the_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("paceline.rag.parsing.readers.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lxml", "lxml.etree", "pypdfium2", "pypdfium2.raw"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "paceline.rag.parsing.readers.content", content)
    for kind in LIBRARIES[library]:
        with pytest.raises(content.UnreadableError, match=rf"{library}, .* pip install 'paceline\[documents\]'"):
            reader(kind)  # type: ignore[arg-type]
    for kind in ("text", "markdown", "code", "csv", "json", "ipynb", "rtf", "eml"):
        reader(kind)  # type: ignore[arg-type]


def test_a_parser_gets_no_variable_that_may_be_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEYS", "a secret")
    with ParserProcess() as parser:
        parser.parse_bytes("a.txt", b"words")
        assert parser.pid is not None
        assert "secret" not in str(psutil.Process(parser.pid).environ())
        assert psutil.Process(parser.pid).cwd() == "/"


def test_processes_end_with_their_user(endless: Path) -> None:
    script = """
import sys, threading
from paceline.rag.parsing.process import ParserProcess
parser = ParserProcess()
threading.Thread(target=lambda: parser.parse("a.rtf", open(sys.argv[1], "rb")), daemon=True).start()
while parser.pid is None:
    pass
print(parser.pid, flush=True)
threading.Event().wait()
"""
    command = [sys.executable, "-c", script, str(endless)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=process_module._environment()) as user:
        assert user.stdout is not None
        worker = psutil.Process(int(user.stdout.readline()))
        while not (children := worker.children()):
            pass
        user.kill()
    gone, alive = psutil.wait_procs([worker, *children], timeout=120)
    assert not alive and len(gone) == 2


@pytest.mark.parametrize(
    ("whom", "with_what", "error", "words"),
    [
        ("the parser", signal.SIGKILL, ParserLost, "was killed"),
        ("the whole process", signal.SIGKILL, ParserLost, "was killed"),
        ("the parser", signal.SIGSEGV, DocumentError, "ends the program that reads it (signal 11)"),
    ],
)
def test_a_document_whose_parser_is_killed_or_crashes_is_lost_and_the_next_is_read(
    endless: Path, whom: str, with_what: signal.Signals, error: type[Exception], words: str
) -> None:
    with ParserProcess() as parser:
        thread, errors = parsing(parser, endless)
        child = child_of(parser)
        (child if whom == "the parser" else psutil.Process(parser.pid)).send_signal(with_what)
        thread.join()
        assert [type(each) for each in errors] == [error]
        assert words in str(errors[0])
        assert parser.parse_bytes("a.md", b"# Next").title == "Next"
        psutil.wait_procs([child], timeout=120)
        assert not child.is_running()


def test_a_document_is_no_worse_for_a_system_that_gives_its_reader_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
import errno, os
from paceline.rag.parsing import worker

def fork():
    raise BlockingIOError(errno.EAGAIN, "no process")

os.fork = fork
worker.main()
"""

    def started(stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        command, variables = [sys.executable, "-c", script], process_module._environment()
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, env=variables, start_new_session=True)

    monkeypatch.setattr(process_module, "_worker", started)
    with ParserProcess() as parser:
        for _ in range(2):
            with pytest.raises(BlockingIOError):
                parser.parse_bytes("a.md", b"# Next")


def test_a_file_of_a_folder_is_read_again_when_its_parser_is_killed(endless: Path) -> None:
    with closing(ParserPool(1, Limits(cpu_s=1))) as parsers:
        outcomes: list[object] = []

        def run() -> None:
            outcomes.extend(read_files([FoundFile(endless, "endless.rtf")], parsers))

        thread = threading.Thread(target=run)
        thread.start()
        while not (pids := [each.pid for each in list(parsers._busy) if each.pid is not None]):
            pass
        child_below(pids[0]).kill()
        thread.join()
        ((_, error),) = outcomes
        assert isinstance(error, DocumentError) and "takes too long to be read, more than 1 s" in str(error), (
            "the second time its own limit"
        )


def test_small_texts_need_no_process_and_read_as_there(parser: ParserProcess) -> None:
    contents = {
        "a.md": b"# A\tTitle\x0c\n\n| a | b |\n|---|---|\n| one | two |\n| three | four |\r\n",
        "b.txt": b"\xef\xbb\xbfA title\n\nwords",
        "c.py": b"def f():\n    pass\n",
    }
    apart = {
        "d.txt": b"%PDF-1.7 that ends at once",
        "e.txt": b"caf\xe9, of before Unicode",
        "f.txt": b" \n",
        "g.md": b"words " * 20_000,
        "h.csv": b"a,b",
        "i.txt": damaged_archive(),
    }
    for name, data in (contents | apart).items():
        with memory_file(data) as document:
            read = plain_text(name, document)
            assert read == (parser.parse(name, document) if name in contents else None)
    with closing(ParserPool(1)) as pool:
        assert pool.submit("a.md", lambda: memory_file(b"# Title")).result().title == "Title"
        for name in ("d.txt", "i.txt"):
            assert "damaged" in str(pool.submit(name, partial(memory_file, apart[name])).exception())


def damaged_archive() -> bytes:
    """An archive whose part that tells its kind cannot be unpacked."""
    written = io.BytesIO()
    with ZipFile(written, "w", ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        archive.writestr("content.xml", "<a/>")
    data = bytearray(written.getvalue())
    begin = data.index(b"mimetype") + len("mimetype")
    data[begin : begin + 4] = b"\xff" * 4
    return bytes(data)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that opens and cannot be read is Linux's")
def test_a_file_that_opens_and_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    unread, text = tmp_path / "a.md", tmp_path / "b.md"
    unread.symlink_to("/proc/self/mem")
    text.write_text("words")
    with closing(ParserPool(1)) as pool:
        (_, failed), (_, read) = read_files([FoundFile(unread, "a.md"), FoundFile(text, "b.md")], pool)
    assert isinstance(failed, DocumentError) and "a.md is damaged" in str(failed)
    assert not isinstance(read, DocumentError) and read.text == "words"


def test_the_processor_time_that_a_document_took_is_known_however_its_parser_ended(endless: Path) -> None:
    with ParserProcess(Limits(cpu_s=1)) as parser, endless.open("rb") as document:
        with pytest.raises(DocumentError, match="takes too long"):
            parser.parse("endless.rtf", document)
        whole = parser.cpu_s
        parser.parse_bytes("a.md", b"# Short")
        assert 0 < parser.cpu_s < whole, "of this document alone"
        thread, _ = parsing(parser, endless)
        child_of(parser)
        psutil.Process(parser.pid).kill()
        thread.join()
        assert parser.cpu_s == 1.0, "nobody knows: its limit"


def test_a_key_whose_documents_took_its_seconds_is_refused_until_its_hour_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, budget = 1000.0, ParserBudget()
    read_from(monkeypatch, lambda: now, process_module)
    budget.check("ann")
    budget.spend("ann", BUDGET_S / 2)
    now += WINDOW_S / 2
    budget.check("ann")
    budget.spend("ann", BUDGET_S / 2)
    budget.check("bert")
    with pytest.raises(RequestError, match="again in 30 min") as refused:
        budget.check("ann")
    assert (refused.value.status, refused.value.retry_after) == (429, 1800)
    now += WINDOW_S / 2
    budget.check("ann")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no JSON",
        b"{}\n",
        b'{"size": 5}\nwords and more',
        b'{"size": 2}\n\xff\xfe',
        b'{"size": 5, "kind": "spell"}\nwords',
        b'{"size": 5, "pages": "all"}\nwords',
        b'{"size": 5, "title": 5}\nwords',
        b'{"reason": "is bad", "code": "x"}\n',
    ],
)
def test_an_answer_that_is_none_is_not_believed(answer: bytes) -> None:
    with pytest.raises(DocumentError, match=r"^a\.pdf .*\.$"):
        process_module._checked("a.pdf", *answer.partition(b"\n")[::2])


def test_what_a_parser_says_is_cut_and_cleaned() -> None:
    with pytest.raises(DocumentError) as caught:
        process_module._checked(
            "a.pdf", b'{"reason": "is bad\\n\\u001b[31m%s", "code": "unsupported_file"}' % (b"!" * 5000), b""
        )
    assert caught.value.code == "unsupported_file"
    assert str(caught.value).isprintable() and len(str(caught.value)) <= MAX_REASON + 10
    read = process_module._checked("a.pdf", b'{"size": 5, "title": "a\\nb", "pages": [9, 3]}', b"words")
    assert (read.title, read.pages, read.text) == ("a b", (), "words")


def test_a_parser_that_writes_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr(process_module, "_MAX_HEAD", 1000)
    with ParserProcess() as parser:
        with pytest.raises(DocumentError, match="write too much"):
            parser.parse_bytes("a.txt", b"words " * 10_000)
        assert parser.parse_bytes("a.md", b"# Next").title == "Next"


def test_what_a_refused_document_took_counts_and_the_operator_has_no_limit(
    endless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "BUDGET_S", 0.5)
    with closing(ParserPool(1, Limits(cpu_s=1))) as pool:
        for owner, refusal in [("ann", DocumentError), ("ann", RequestError), ("", DocumentError)]:
            parsed = pool.submit("endless.rtf", lambda: endless.open("rb"), owner=owner)
            assert type(parsed.exception()) is refusal
        assert pool.submit("a.md", lambda: memory_file(b"# Next"), owner="").result().title == "Next"
