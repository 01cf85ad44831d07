"""Checks of `paceline doctor`: one function per subject, which returns a status and a sentence (`outcome`).

Changes nothing, except that it creates and removes a temporary file in state directories.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from paceline import __version__, models
from paceline.commands.diagnosis.extras import extras
from paceline.commands.diagnosis.models import model
from paceline.commands.diagnosis.outcome import Check, Found, NodeChecks, Status
from paceline.commands.diagnosis.programs import program
from paceline.core.permission import EVERYBODY, NOBODY
from paceline.errors import ConfigError, PacelineError
from paceline.settings import AgentSettings, NodeSettings

GIB = 1 << 30
MIN_MEMORY = 2 * GIB  # both demo processes together need about 1.5
MIN_DISK = GIB
FAST = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")  # as /proc/cpuinfo spells them


def run(nodes: tuple[NodeSettings, ...], others: NodeChecks) -> Iterator[Check]:
    """Run all checks in order. A check that raises has failed; the others still run. others: of each node too."""
    subjects: list[tuple[str, Callable[[], Found]]] = [
        ("python", python),
        ("packages", packages),
        ("extras", extras),
        ("torch", torch_build),
        ("processor", processor),
        ("sampling", sampling),
        ("memory", memory),
        ("embedder", embedder),
        ("relevance", lambda: relevance(nodes)),
        ("documents", documents),
        ("demo model", lambda: demo_model(models.READER)),
        ("demo cloud model", lambda: demo_model(models.CLOUD)),
        ("demo device model", lambda: demo_model(models.DEVICE)),
    ]
    for node in nodes:
        subjects += [
            (f"{node.side} state", partial(state_directory, node.state_dir)),
            (f"{node.side} disk", partial(disk, node.state_dir)),
            (f"{node.side} at rest", partial(at_rest, node)),
            (f"{node.side} energy", partial(energy, node)),
            (f"{node.side} units", partial(units, node)),
        ]
        for number, wanted in enumerate(node.model, start=1):
            name = f"{node.side} model{'' if number == 1 else f' {number}'}"
            subjects.append((name, partial(model, node, wanted)))
        subjects.append((f"{node.side} program", partial(program, node)))
        subjects += [(name, look) for name, check in others.items() if (look := check(node)) is not None]
        if isinstance(node, AgentSettings):
            subjects.append(("cloud may ask", partial(cloud_may_ask, node)))
    for name, look in subjects:
        try:
            status, text = look()
        except (PacelineError, OSError, ImportError) as error:
            status, text = "fail", str(error)
        yield Check(name, status, text)


def python() -> Found:
    status: Status = "ok" if sys.version_info >= (3, 11) else "fail"
    return status, f"paceline {__version__} on Python {platform.python_version()}, {platform.platform(terse=True)}"


def packages() -> Found:
    """Compare installed versions with paceline's requirements."""
    try:
        wanted = [Requirement(line) for line in requires("paceline") or ()]
    except PackageNotFoundError:
        return "warn", "paceline runs from a checkout that is not installed: run `pip install -e .`"
    wrong, present = [], []
    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        present.append(f"{requirement.name} {installed}")
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    if wrong:
        return "fail", f"{'; '.join(wrong)}: install paceline again"
    return "ok", ", ".join(present)


def torch_build() -> Found:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return "ok", f"{torch.__version__}, {build}, {gpu}, {torch.get_num_threads()} threads"


def processor() -> Found:
    """Check for AVX-512 BF16 or AMX, without which packed bfloat16 weights are slow."""
    import torch

    flags = _cpu_flags()
    fast = [flag for flag in FAST if flag in flags]
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} core{'' if cores == 1 else 's'}, {', '.join(fast) or 'none of ' + ', '.join(FAST)}"
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "warn", f"{text}; no bfloat16 arithmetic, so weights are kept as float32 and need twice the memory"
    return "ok", f"{text}, bfloat16"


def sampling() -> Found:
    """Check for the kernel in C that samples rows on a CPU."""
    from paceline.engine.sampling.row_kernel import kernel

    if kernel() is None:
        return "warn", "on a CPU by numpy, several times slower: install a C compiler, then paceline again"
    return "ok", "on a CPU by the kernel in C"


def memory() -> Found:
    free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
    text = f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB available"
    return ("ok", text) if free >= MIN_MEMORY else ("warn", f"{text}; the demo needs about {MIN_MEMORY // GIB}")


def disk(directory: Path) -> Found:
    free = psutil.disk_usage(str(_existing(directory))).free
    text = f"{free / GIB:.1f} GiB free for {directory}"
    return ("ok", text) if free >= MIN_DISK else ("warn", f"{text}; documents and caches need room")


def embedder() -> Found:
    """Load and run the embedder, which checks the weights' sha256."""
    from paceline.rag.embedder import DEFAULT, load_embedder

    chosen = load_embedder(DEFAULT)
    (vector,) = chosen.embed(["a bicycle race"])
    return "ok", f"{chosen.name}, {len(vector)} dimensions, weights as known"


def relevance(nodes: tuple[NodeSettings, ...]) -> Found:
    """Compare the scales of relevance in the settings of both programs; embedders by their names."""
    scales = {node.side: f"{node.embedder}, temperature {node.relevance_temperature:g}" for node in nodes}
    if len(set(scales.values())) < 2:
        return "ok", next(iter(scales.values()), "no program is set up")
    told = "; ".join(f"{side}: {scale}" for side, scale in scales.items())
    return "warn", f"{told}; where these two are linked, the documents of both weigh the same"


def documents() -> Found:
    """Parse a document as the server would, in a process of its own."""
    from paceline.rag.parsing.process import ParserProcess

    with ParserProcess() as parser:
        parser.parse_bytes("page.html", b"<p>a bicycle race")
        if parser.has_network:
            return "warn", "parsed in a process of their own, which this machine leaves with access to the network"
        if parser.has_files:
            return "warn", "parsed in a process of their own, which may read your files: this kernel has no Landlock"
    return "ok", "parsed in a process of their own, without network and without access to your files"


def demo_model(directory: Path) -> Found:
    from paceline.engine.loader import find, fingerprint

    if not directory.is_dir():
        raise ConfigError(f"{directory} is missing: install paceline again")
    megabytes = sum(file.stat().st_size for file in find(directory).glob("*.safetensors")) / 1e6
    return "ok", f"{megabytes:.1f} MB, fingerprint {fingerprint(directory)[:12]}"


def state_directory(directory: Path) -> Found:
    """Check that the directory of credentials and private documents is writable and not readable by others."""
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=_existing(directory)):
            return "ok", f"{directory} will be made"
    with tempfile.TemporaryFile(dir=directory):
        pass
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        return "warn", f"{directory} can be read by others (mode {mode:o}): run `chmod 700 {directory}`"
    return "ok", f"{directory}, mode {mode:o}"


def at_rest(settings: NodeSettings) -> Found:
    """Say whether documents and answers are to be encrypted on the disk, and where their keys lie."""
    from paceline.sealing.answers import answers_key
    from paceline.sealing.store_key import StoreKey, system_keyring

    if not settings.encrypt_documents:
        return (
            "ok",
            f"documents and responses stay as they are on the disk: {settings.docs_dir} (encrypt_documents)",
        )
    where, answers = StoreKey(settings.docs_dir), answers_key(settings.state_dir)
    if where.path.exists():
        where.read()
        answers.read()
        return "ok", (
            f"documents and stored responses are encrypted; {where.path} and {answers.path} hold the keys, or say "
            "where in the keyring they are"
        )
    place = "the system's keyring" if system_keyring() is not None else str(where.path)
    return "ok", f"documents and stored responses will be encrypted, with keys as in {place}"


def energy(settings: NodeSettings) -> Found:
    """Say where the energy of answers is read. The model is not loaded: what it is modelled by is told at start-up."""
    from paceline.bootstrap import energy_meter

    if settings.energy_meter == "workload":
        return "ok", f"modelled by operations, at {settings.compute_gflops or 0.0:g} GFLOP/s (compute_gflops)"
    return "ok", energy_meter(settings, None).text


def units(settings: NodeSettings) -> Found:
    """List the processing units of workflows. Which of a linked cloud's take part is known once it is linked."""
    from paceline.bootstrap import workflow_units

    found = workflow_units(settings)
    threads = [f"{host.name} ({'+'.join(sorted(host.does))} on {_cores(host.cores)})" for host in found.hosts]
    reranker = settings.reranker or "the embedder's late interaction, if it has that"
    return "ok", (
        f"{', '.join(threads)}; {found.engine} in {found.lanes} lanes on {_cores(found.engine_cores)}; "
        f"reranking by {reranker}"
    )


def _cores(cores: frozenset[int]) -> str:
    return f"cores {', '.join(map(str, sorted(cores)))}" if cores else "any core"


def cloud_may_ask(settings: AgentSettings) -> Found:
    """Say who among the cloud's clients may have this device read private documents."""
    from paceline.runtime.asking import permission

    may_ask, origin = permission(settings)
    most = ((settings.cloud_asks_per_minute, "a minute"), (settings.cloud_asks_per_hour, "an hour"))
    limits = " and ".join(f"{number} {time}" for number, time in most if number) or "as often as it likes"
    if may_ask == NOBODY:
        return "ok", f"off ({origin}): no client of the cloud has this device read private documents"
    if may_ask == EVERYBODY:
        return "warn", f"on ({origin}): whoever runs the cloud can ask what private documents say, {limits}"
    return "warn", f"{may_ask} ({origin}): keys by name, which an untrusted cloud can use for itself, {limits}"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _cpu_flags() -> frozenset[str]:
    """Flags from /proc/cpuinfo; empty on systems other than Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))
