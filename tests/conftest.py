"""Fixtures of all tests: one torch thread, asyncio as anyio's backend, nothing from the user's own environment.

Hypothesis uses the same examples in every run, of a law as many as the depth allows, and no deadline, so that a slow
machine fails no test.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.depth import DEPTH
from tests.forked import USUAL, Starts, forked_starts, starting

if TYPE_CHECKING:
    from tests.postgres import RealPostgres

settings.register_profile("paceline", deadline=None, derandomize=True, database=None, max_examples=60 * DEPTH)
settings.load_profile("paceline")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: two processes on two cores, not four threads
os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.null.Keyring"  # never the user's own
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that would download fails at once
if "TEST_DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests where there is a GPU
    os.environ["TRITON_INTERPRET"] = "1"  # its kernels run on the CPU, where triton is installed
# Processes that tests start compile the package once, not each for itself: a quarter of what a start costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["TEST_DEPTH"] = os.environ.get("PACELINE_TEST_DEPTH") or os.environ.get("TEST_DEPTH", "1")  # for workers too
ON_POSTGRES = bool(os.environ.get("TEST_DATABASE"))
for key in [key for key in os.environ if key.startswith("PACELINE_")]:
    del os.environ[key]


EMBEDDED = {  # what a test with this mark is about, and why it says nothing of a server on PostgreSQL
    "a failing disk": "PostgreSQL's own: where fsync fails it ends, and begins again with what was acknowledged",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [(item, mark.args[0]) for item in items if (mark := item.get_closest_marker("embedded"))]
    assert {reason for _, reason in marked} <= EMBEDDED.keys()
    if ON_POSTGRES and marked:
        left_out = [item for item, _ in marked]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once() -> Iterator[None]:
    """TLS of tests' clients: reading the authorities takes longer than most requests, which are of plain HTTP."""
    from httpx._transports import default

    make = default.create_ssl_context

    @functools.cache
    def kept(verify: bool, trust_env: bool, *_: str | None) -> object:
        return make(verify, None, trust_env)

    def made(verify: object = True, cert: object = None, trust_env: bool = True) -> object:
        if cert is not None or not isinstance(verify, bool):
            return make(verify, cert, trust_env)  # type: ignore[arg-type]  # as it was called
        return kept(verify, trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(default, "create_ssl_context", made)
        yield


@pytest.fixture(scope="session", autouse=True)
def modules_are_kept() -> None:
    """The garbage collector, which many tests call, does not look through all that has been imported."""
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[RealPostgres]:
    from tests.postgres import real_postgres

    with real_postgres() as server:
        yield server


@pytest.fixture(params=["postgres"] if ON_POSTGRES else ["files", "postgres"])
def kept(request: pytest.FixtureRequest, forked: Starts) -> Iterator[None]:
    """Where servers that a test starts keep what they keep: what needs this holds in either place."""
    with nullcontext() if ON_POSTGRES or request.param == "files" else _on_postgres(request), starting(forked):
        yield


def _on_postgres(request: pytest.FixtureRequest) -> AbstractContextManager[object]:
    from tests.postgres import on_postgres

    return on_postgres(request.getfixturevalue("postgres"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def _states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that do not exist yet. (`mktemp` reads the names of all that do: seconds among ten thousand.)"""
    root = tmp_path_factory.mktemp("states")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_state_directory(_states: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Default state directories lie in a fresh folder, in this process and in those it starts."""
    directory = next(_states)
    directory.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory


@pytest.fixture(scope="session")
def forked(request: pytest.FixtureRequest) -> Iterator[Starts]:
    """How programs start where a start is not what is tested: by fork, at night by exec, as users start them.

    With TEST_DATABASE=1 servers among them keep what they keep in a PostgreSQL.
    """
    by_exec = request.config.getoption("nightly", default=False)
    where = _on_postgres(request) if ON_POSTGRES else nullcontext()
    with where, nullcontext(USUAL) if by_exec else forked_starts() as starts:
        yield starts


@pytest.fixture(scope="module")
def forks(forked: Starts) -> Iterator[None]:
    """For modules that say so: programs that their tests start are forks."""
    with starting(forked):
        yield
