"""Checks of `paceline doctor`: machine, installation, stores, settings, models and running programs.

One function per subject. Changes nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import json
import os
import platform
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from math import prod
from pathlib import Path
from typing import Final

import psutil
from packaging.requirements import Requirement

from paceline import __version__, models
from paceline.commands.options import Found, NodeChecks, Status
from paceline.core.side import EVERYBODY, NOBODY
from paceline.errors import ConfigError, PacelineError
from paceline.hub.cache import has_torch
from paceline.settings import AgentSettings, NodeSettings, ServerSettings
from paceline.system import cores, missing, processor_flags, usable_cores, usable_memory


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Status
    text: str


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch", "transformers"),
    "light": ("gguf", "xllamacpp"),
    "gguf": ("gguf", "xllamacpp"),
    "documents": ("pypdfium2", "python_calamine", "lxml.etree", "charset_normalizer"),
    "chat": ("prompt_toolkit",),
    "keyring": ("keyring",),
    "nvml": ("pynvml",),
    "otel": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    "openai-ids": ("bpe_openai",),
    "bench": ("jsonschema",),
    "gpu": ("triton",),
    "mcp": ("mcp",),
    "qr": ("segno",),
    "postgres": ("psycopg", "psycopg_pool"),
}
"""The modules of each extra that paceline imports; `test` and `lint` are of no use to who runs it."""


def extras() -> Found:
    """Say whether what is installed of the optional extras can be imported, which is not the same."""
    works, absent, wrong = [], [], []
    for extra, modules in EXTRAS.items():
        faults = [_fault_of(module) for module in modules] + _unfit(extra)
        if None in faults:
            absent.append(extra)
        elif told := "; ".join(fault for fault in faults if fault):
            wrong.append(f"{extra} does not work ({told}): pip install 'paceline[{extra}]'")
        else:
            works.append(extra)
    lines = [*wrong, *([f"{', '.join(works)} work{'s' * (len(works) == 1)}"] if works else [])]
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    return "warn" if wrong else "ok", "; ".join(lines)


def _fault_of(module: str) -> str | None:
    """Why it cannot be imported; "" if it can; None if it is not there."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return None
        return f"{module}: {error}"
    except Exception as error:  # anything may be wrong with a package of others
        return f"{module}: {type(error).__name__}: {error}"
    return ""


def _unfit(extra: str) -> list[str]:
    """Packages of the extra in a release that paceline was not made for."""
    with suppress(PackageNotFoundError):  # `packages` says so
        return _compared(extra)[1]
    return []


def _compared(extra: str = "") -> tuple[list[str], list[str], list[str]]:
    """Requirements of paceline, or of an extra: present, of a wrong release, or missing."""
    here, wrong, missing = [], [], []
    for line in requires("paceline") or ():
        requirement = Requirement(line)
        plain = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if plain == bool(extra) or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            missing.append(f"{requirement} is missing")
            continue
        here.append(f"{requirement.name} {installed}")
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    return here, wrong, missing


GIB: Final = 1 << 30
INDEX: Final = "model.safetensors.index.json"


def model(settings: NodeSettings, wanted: str) -> Found:
    """Check that this model of the settings can be loaded: files, chat template, and memory beside what is there. No
    weight is read. Raises ConfigError, with what to do, where it cannot. Not handled: kernels and operations that a
    model needs, which only loading it tells."""
    if wanted.startswith("fake"):
        return "ok", f"{wanted}: made up, for tests"
    if isinstance(settings, ServerSettings) and settings.engine_url:
        return _at_servers(settings)
    from paceline.hub.cache import find_gguf

    if wanted not in models.shipped(settings.side) and (file := find_gguf(wanted)) is not None:
        return _look_at_gguf(wanted, file)
    directory = local_folder(settings, wanted)
    if directory is None:
        return _at_hub(wanted)
    return _look(settings, wanted, directory)


def _at_servers(settings: ServerSettings) -> Found:
    from paceline.model_opening import open_far_model

    far = open_far_model(settings)[0]
    lacks = far.abilities.missing()
    text = f"{far.info.name}: run by {', '.join(settings.engine_url)}, {far.info.max_positions} tokens of context"
    return ("warn", f"{text}; {'; '.join(lacks)}") if lacks else ("ok", text)


def local_folder(settings: NodeSettings, wanted: str) -> Path | None:
    """Where a model lies on this machine; None for one that would have to be fetched. Raises ConfigError for what is no
    model."""
    from paceline.hub.cache import find
    from paceline.hub.download import HubName, local

    if (bundled := models.shipped(settings.side).get(wanted)) is not None:
        return find(bundled)
    if not Path(wanted).expanduser().is_dir():
        name = HubName.parse(wanted)
        try:
            local(name)
        except ConfigError:
            return None
    return find(wanted, download=False)


def _at_hub(wanted: str) -> Found:
    from paceline.hub.download import HubName, Unreachable, remote_size

    try:
        size = remote_size(HubName.parse(wanted))
    except Unreachable as error:
        return "warn", f"{wanted} is not on this machine, and the hub cannot be asked for it: {error}"
    return "warn", (
        f"{wanted} is not on this machine: its {size / 1e9:.1f} GB are fetched at the start, or before by `paceline "
        f"models pull {wanted}`"
    )


def _look(settings: NodeSettings, wanted: str, directory: Path) -> Found:
    from paceline.engine.loader import choose_device, describe_model
    from paceline.hub.cache import facts_of
    from paceline.model_opening import memory_of
    from paceline.runtime.served_models import OVERHEAD

    described, facts = describe_model(directory, name=wanted), facts_of(directory)
    if facts.kind not in ("chat", "reader"):
        raise ConfigError(f"{wanted} is a {facts.architecture or 'model'}, which writes no text: choose another model.")
    sizes = _tensors(directory)
    device = choose_device(settings.engine_device)
    numbers = sum(sizes.values())
    dtype, kept = ("float32", 4 * numbers) if facts.kind == "reader" else _loaded_as(settings, device, sizes, directory)
    needed = int(OVERHEAD * kept)
    free, total = memory_of("cpu" if facts.kind == "reader" else device)
    text = (
        f"{wanted}: {numbers / 1e6:.0f} million weights as {dtype}, {described.info.max_positions} tokens "
        f"of context, about {needed / GIB:.1f} GiB to load, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    )
    if (short := _short(needed, free, total, text)) is not None:
        return short
    if facts.kind == "chat" and not facts.has_template:
        return "warn", f"{text}; without a chat template, so written to in ChatML: an instruct model answers better"
    return "ok", text


def _look_at_gguf(wanted: str, file: Path) -> Found:
    from paceline.hub.gguf import described
    from paceline.model_opening import memory_of

    found, needed, (free, total) = described(file), file.stat().st_size, memory_of("cpu")
    text = (
        f"{wanted}: weights as {found.number_format}, {found.context} tokens of context, a file of "
        f"{needed / GIB:.1f} GiB, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    )
    return _short(needed, free, total, text) or ("ok", text)


def _short(needed: int, free: int, total: int, text: str) -> Found | None:
    """The finding of a model for which memory is short; None where it is not. text: said of the model."""
    if needed > total:
        return "fail", f"{text}: choose a smaller model, or spread it with stages"
    return ("warn", f"{text}: end other programs, or choose a smaller model") if needed > free else None


def _tensors(directory: Path) -> dict[str, int]:
    """Weights of each number format, as safetensors calls it, by the headers of all files. Raises ConfigError for files
    that are missing, cut or damaged."""
    from safetensors import SafetensorError, safe_open

    _check_parts(directory)
    found: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as stored:
                for name in stored.keys():  # noqa: SIM118  # no mapping
                    tensor = stored.get_slice(name)
                    found[tensor.get_dtype()] = found.get(tensor.get_dtype(), 0) + prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged or was cut ({error}): fetch or copy it again.") from None
    if not any(found.values()):
        raise ConfigError(f"{directory} has no weights in its *.safetensors: fetch or copy it again.")
    return found


def _check_parts(directory: Path) -> None:
    """Raises ConfigError where a part that the model's index names is missing."""
    try:
        named = json.loads((directory / INDEX).read_text("utf-8"))["weight_map"].values()
        parts = sorted({str(part) for part in named})
    except FileNotFoundError:
        return  # one file
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{directory / INDEX} cannot be read: fetch or copy the model again.") from None
    missing = [part for part in parts if not (directory / part).is_file()]
    if missing:
        raise ConfigError(
            f"{directory} lacks {len(missing)} of {len(parts)} files of its weights, among them {missing[0]}: fetch or "
            "copy them."
        )


def _loaded_as(settings: NodeSettings, device: str, sizes: dict[str, int], directory: Path) -> tuple[str, int]:
    """Number format of the model's arithmetic, and bytes of its weights in memory."""
    import torch

    from paceline.engine.weights import format_of

    chosen = format_of(settings.dtype, torch.device(device), directory)
    kept = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    if not chosen.by_rows:
        kept = chosen.computed.itemsize * sum(sizes.values())
    return str(chosen.computed).removeprefix("torch."), kept


ANSWER_S = 5.0


def program(settings: NodeSettings) -> Found:
    """Say whether this side's program runs and can be asked, or whether its port is free."""
    where, url = f"{settings.host}:{settings.port}", _url(settings)
    fault = bind_fault(settings.host, settings.port)
    if fault is None:
        return "ok", f"nothing runs on {where}, which is free"
    found = _get(f"{url}/readyz")
    if found is None or "side" not in found:
        return "warn", f"{where} cannot be used ({fault}): stop what runs there or choose another"
    if found["side"] != settings.side:
        return "warn", f"on {where} runs a program of the {found['side']}: stop it, or choose another port"
    documents = found.get("documents")
    linked = "linked with its cloud" if found.get("linked") else "not linked with a cloud"
    if settings.side == "cloud":
        linked = f"{found.get('peers', 0)} linked"
    text = f"runs on {where}, model {found.get('model')}, {documents} document{'' if documents == 1 else 's'}, {linked}"
    told = f"{text}; {_models(url)}"
    if not found.get("ready"):
        why = found.get("engine", found.get("keys", "it is stopping"))
        return "fail", f"{told}; it cannot be asked now: {why}"
    return "ok", told


def outside(settings: NodeSettings) -> Found:
    """Ask a stranger's endpoint for its models, and tell it nothing else. Raises PacelineError."""
    from paceline.bootstrap import open_outside

    async def look() -> str:
        endpoint = open_outside(settings)
        assert endpoint is not None, "it is set"
        try:
            return await endpoint.look()
        finally:
            await endpoint.close()

    return "ok", asyncio.run(look())


def bind_fault(host: str, port: int) -> str | None:
    """Why this port cannot be listened on; None where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _url(settings: NodeSettings) -> str:
    """Where this machine reaches a program that listens as the settings say."""
    host = settings.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{settings.port}"
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _models(url: str) -> str:
    found = _get(f"{url}/v1/models")
    listed = None if found is None else found.get("data")
    if not isinstance(listed, list):
        return "its models are listed for keys alone"
    chat = [each for each in listed if isinstance(each, dict) and ":" not in str(each.get("id"))]
    states = ((str(each.get("id")), each.get("paceline")) for each in chat)
    named = [f"{name} ({own['state']})" for name, own in states if isinstance(own, dict) and "state" in own]
    return f"models {', '.join(named)}"


def _get(url: str) -> Mapping[str, object] | None:
    import httpx

    try:
        found = httpx.get(url, timeout=ANSWER_S, trust_env=False).json()
    except (httpx.HTTPError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


MIN_MEMORY = 2 * GIB  # both demo processes together need about 1.5
MIN_DISK = GIB
FAST = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")  # as /proc/cpuinfo spells them


def run(nodes: tuple[NodeSettings, ...], others: NodeChecks) -> Iterator[Check]:
    """Run all checks in order. A check that raises has failed; the others still run. others: of each node too."""
    subjects: list[tuple[str, Callable[[], Found | None]]] = [
        ("python", python),
        ("packages", packages),
        ("extras", extras),
        *((("torch", torch_build),) if has_torch() else ()),
        ("processor", processor),
        ("sampling", sampling),
        ("system", system),
        ("memory", memory),
        ("embedder", embedder),
        ("relevance", partial(relevance, nodes)),
        ("documents", documents),
        ("demo model", partial(demo_model, models.READER)),
        ("demo cloud model", partial(demo_model, models.CLOUD)),
        ("demo device model", partial(demo_model, models.DEVICE)),
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
        if node.outside.url is not None:
            subjects.append((f"{node.side} outside", partial(outside, node)))
        subjects += [(name, partial(check, node)) for name, check in others.items()]
        if isinstance(node, AgentSettings):
            subjects.append(("cloud may ask", partial(cloud_may_ask, node)))
    for name, look in subjects:
        try:
            found = look()
        except (PacelineError, OSError, ImportError) as error:
            found = "fail", str(error)
        if found is not None:
            yield Check(name, *found)


def python() -> Found:
    return "ok", f"paceline {__version__} on Python {platform.python_version()}, {platform.platform(terse=True)}"


def packages() -> Found:
    """Compare installed versions with paceline's requirements."""
    try:
        here, wrong, missing = _compared()
    except PackageNotFoundError:
        return "warn", "paceline runs from a checkout that is not installed: run `pip install -e .`"
    if wrong or missing:
        return "fail", f"{'; '.join([*missing, *wrong])}: install paceline again"
    return "ok", ", ".join(here)


def torch_build() -> Found:
    """Import what engines in torch need of it, and look for bfloat16."""
    import torch

    from paceline.engine.tensors import computes_bfloat16

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    text = f"{torch.__version__}, {build}, {gpu}, {torch.get_num_threads()} threads"
    if not computes_bfloat16():
        return "warn", f"{text}; no bfloat16 arithmetic, so weights of half precision are converted by rows to float32"
    return "ok", f"{text}, bfloat16"


def processor() -> Found:
    """Check for AVX-512 BF16 or AMX, without which packed bfloat16 weights are slow."""
    fast = [flag for flag in FAST if flag in processor_flags()]
    count = len(cores())
    limit = f" (a container's limit pays for {usable})" if (usable := usable_cores()) < count else ""
    return "ok", f"{count} core{'' if count == 1 else 's'}{limit}, {', '.join(fast) or 'none of ' + ', '.join(FAST)}"


def sampling() -> Found:
    """Check for the kernel in C that samples rows on a CPU."""
    from paceline.engine.sampling.row_kernel import kernel

    if kernel() is None:
        return "warn", "on a CPU by numpy, several times slower: install a C compiler, then paceline again"
    return "ok", "on a CPU by the kernel in C"


def system() -> Found:
    """Say what this system does not protect or limit."""
    if lacking := missing():
        return "warn", "; ".join(lacking)
    return "ok", f"{platform.system()}: private files, locks, cores and process groups"


def memory() -> Found:
    free, total = usable_memory()
    text = f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB available"
    return ("ok", text) if free >= MIN_MEMORY else ("warn", f"{text}; the demo needs about {MIN_MEMORY // GIB}")


def disk(directory: Path) -> Found:
    free = psutil.disk_usage(str(_existing(directory))).free
    text = f"{free / GIB:.1f} GiB free for {directory}"
    return ("ok", text) if free >= MIN_DISK else ("warn", f"{text}; documents and caches need room")


def embedder() -> Found:
    """Load and run the embedder, which checks the weights' sha256."""
    from paceline.rag.embedder import DEFAULT, kernel, load_embedder

    chosen = load_embedder(DEFAULT)
    (vector,) = chosen.embed(["a bicycle race"])
    how = "in float32, a quarter as fast as with a C compiler and VNNI" if kernel() is None else "in 8 bits"
    return "ok", f"{chosen.name}, {len(vector)} dimensions, weights as known, {how}"


def relevance(nodes: tuple[NodeSettings, ...]) -> Found:
    """Compare the embedders in the settings of both programs, by their names."""
    scales = {node.side: node.embedder for node in nodes}
    if len(set(scales.values())) < 2:
        return "ok", next(iter(scales.values()), "no program is set up")
    told = "; ".join(f"{side}: {scale}" for side, scale in scales.items())
    return "warn", f"{told}; where these two are linked, the documents of both weigh the same"


def documents() -> Found:
    """Parse a document as the server would, in a process of its own."""
    from paceline.rag.parsing.process import ParserProcess

    with ParserProcess() as parser:
        parser.parse_bytes("page.md", b"a bicycle race")
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
    place = _existing(directory)
    if not os.access(place, os.W_OK | os.X_OK):
        made = "" if place == directory else f"{directory} cannot be made: "
        raise ConfigError(f"{made}you may not write to {place}: change that, or set another state_dir")
    if place != directory:
        return "ok", f"{directory} will be made"
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        return "warn", f"{directory} can be read by others (mode {mode:o}): run `chmod 700 {directory}`"
    return "ok", f"{directory}, mode {mode:o}"


def at_rest(settings: NodeSettings) -> Found:
    """Say whether documents and answers are to be encrypted on the disk, and where their keys lie."""
    from paceline.sealing import StoreKey, answers_key, system_keyring

    if not settings.encrypt_documents:
        return ("ok", f"documents and responses stay as they are on the disk: {settings.docs_dir} (encrypt_documents)")
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

    if settings.energy.meter == "workload":
        return "ok", f"modelled by operations, at {settings.energy.compute_gflops or 0.0:g} GFLOP/s (compute_gflops)"
    return "ok", energy_meter(settings, None).text


def units(settings: NodeSettings) -> Found:
    """List the processing units of workflows. Which of a linked cloud's take part is known once it is linked."""
    from paceline.model_opening import workflow_units

    found = workflow_units(settings)
    threads = [f"{host.name} ({'+'.join(sorted(host.does))} on {_cores(host.cores)})" for host in found.hosts]
    reranker = settings.tuning.reranker or "the embedder's late interaction, if it has that"
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
