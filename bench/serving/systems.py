"""Servers under test: what each needs to be installed, its command line, its address of health and its dialect.

All are processes of their own, ours with the threads that it chooses, the others with as many as the machine has cores,
and all load the same folder of weights.
llama.cpp reads its own format, to which the same weights are copied in the same number format.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

import httpx

from paceline.commands.demo import Child, Children, command, free_port

from .clients import ServingError
from .gguf_file import write_gguf
from .model_files import ModelFiles

START_S: Final = 600.0  # loading on a busy machine, and copying to llama.cpp's format
CONTEXT: Final = 2048  # tokens of an answer of vLLM's
SLOT: Final = 256  # tokens of an answer of llama.cpp's, whose KV cache is taken at the start
MOST_CLIENTS: Final = 64


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class System(Protocol):
    """A server under test."""

    @property
    def name(self) -> str: ...

    @property
    def health(self) -> str:
        """Path that answers 200 once the model is loaded."""

    def lacks(self) -> str | None:
        """Why it cannot run here; None if it can."""

    def arguments(self, model: ModelFiles, port: int) -> Sequence[str]:
        """Command line of the server."""

    def dialect(self, model: ModelFiles, *, temperature: float, top_p: float, seed: int) -> Mapping[str, object]:
        """Fields of a request's body beyond messages, limit and streaming."""


@dataclass(frozen=True, slots=True)
class Paceline:
    """`paceline serve` with a key for each way of asking, since the prefix cache is not shared between keys."""

    keys: tuple[str, ...] = ()
    kv_mib: int | None = None
    name: str = "paceline"
    health: str = "/readyz"

    def lacks(self) -> str | None:
        return None

    def arguments(self, model: ModelFiles, port: int) -> Sequence[str]:
        folder = model.directory.parent
        flags = ["--embedder", "hash", "--log-level", "warning"]
        flags += ["--port", str(port), "--state-dir", str(folder / f"state-{port}")]
        flags += [flag for key in self.keys for flag in ("--api-keys", key)]
        flags += [] if self.kv_mib is None else ["--kv-mib", str(self.kv_mib)]
        return command("serve", "--model", str(model.directory), *flags)

    def dialect(self, model: ModelFiles, *, temperature: float, top_p: float, seed: int) -> Mapping[str, object]:
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        return {"model": model.directory.name, "stream_options": {"include_usage": True}, **sampling}


@dataclass(frozen=True, slots=True)
class Transformers:
    """`transformers serve`, which answers one request after another unless it batches continuously."""

    batching: bool
    health: str = "/health"

    @property
    def name(self) -> str:
        return "transformers serve" + (" --continuous-batching" if self.batching else "")

    def lacks(self) -> str | None:
        return _missing("transformers.cli.serving", "fastapi", "uvicorn", "openai", "accelerate", "rich")

    def arguments(self, model: ModelFiles, port: int) -> Sequence[str]:
        environment = ["env", f"OMP_NUM_THREADS={cores()}", "HF_HUB_OFFLINE=1"]
        serve = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model.directory)]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--dtype", model.dtype]
        return [*environment, *serve, *flags, *(["--continuous-batching"] if self.batching else [])]

    def dialect(self, model: ModelFiles, *, temperature: float, top_p: float, seed: int) -> Mapping[str, object]:
        del top_p, seed  # it samples only if the model's own configuration does; the bench asks it for greedy text
        return {"model": str(model.directory), "temperature": temperature}


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's own server, of the build that the engine `llama_cpp` uses, with a slot for each client."""

    name: str = "llama.cpp server"
    health: str = "/health"

    def lacks(self) -> str | None:
        return _missing("xllamacpp", "gguf")

    def arguments(self, model: ModelFiles, port: int) -> Sequence[str]:
        file = write_gguf(model, model.directory.parent / "model.gguf")
        return [sys.executable, "-c", _LLAMA_SERVER, str(file), str(port), str(cores()), str(MOST_CLIENTS)]

    def dialect(self, model: ModelFiles, *, temperature: float, top_p: float, seed: int) -> Mapping[str, object]:
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed, "ignore_eos": True}
        return {"model": model.directory.name, "stream_options": {"include_usage": True}, **sampling}


_LLAMA_SERVER: Final = f"""
import sys, threading, xllamacpp
file, port, threads, slots = sys.argv[1], *map(int, sys.argv[2:])
wanted = xllamacpp.CommonParams()
wanted.model.path, wanted.port, wanted.hostnames = file, port, ["127.0.0.1"]
wanted.n_parallel, wanted.n_ctx = slots, slots * {SLOT}
wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(wanted)
threading.Event().wait()
"""


@dataclass(frozen=True, slots=True)
class Vllm:
    """`vllm serve` in an environment of its own, since it pins another torch: the one whose `vllm` is on the path."""

    name: str = "vllm serve"
    health: str = "/health"

    def lacks(self) -> str | None:
        return None if shutil.which("vllm") else "not installed: no vllm is on the path"

    def arguments(self, model: ModelFiles, port: int) -> Sequence[str]:
        vllm = Path(shutil.which("vllm") or "vllm").resolve()
        settings = ["VLLM_CPU_KVCACHE_SPACE=1", "VLLM_NO_USAGE_STATS=1", "HF_HUB_OFFLINE=1"]
        openmp = vllm.parents[1] / "lib" / "libiomp5.so"  # its builds for CPUs want Intel's
        if openmp.is_file():
            settings += [f"LD_PRELOAD={openmp}", "VLLM_CPU_OMP_THREADS_BIND=nobind", f"OMP_NUM_THREADS={cores()}"]
        flags = ["--host", "127.0.0.1", "--port", str(port), "--dtype", model.dtype]
        flags += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(MOST_CLIENTS)]
        return ["env", *settings, str(vllm), "serve", str(model.directory), *flags]

    def dialect(self, model: ModelFiles, *, temperature: float, top_p: float, seed: int) -> Mapping[str, object]:
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        return {"model": str(model.directory), "stream_options": {"include_usage": True}, **sampling}


BASELINES: Final[tuple[System, ...]] = (Transformers(batching=False), Transformers(batching=True), LlamaCpp(), Vllm())


def start(children: Children, system: System, model: ModelFiles) -> Child:
    """Start a server and wait until it is healthy. Raises PacelineError with the end of its output if it is not."""
    port = free_port(0)
    child = children.start(f"{system.name.replace(' ', '-')}-{port}", system.arguments(model, port), port=port)
    deadline = time.monotonic() + START_S
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while not _is_healthy(client, child.url + system.health):
            if child.process.poll() is not None:
                children.members.remove(child)
                raise ServingError(f"{system.name} ended with code {child.process.returncode}\n{child.tail()}")
            if time.monotonic() > deadline:
                raise ServingError(f"{system.name} is not ready after {START_S:.0f} s\n{child.tail()}")
            time.sleep(0.1)
    return child


def _is_healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _missing(*modules: str) -> str | None:
    lacking = [name for name in modules if not _is_installed(name)]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its package
        return False
