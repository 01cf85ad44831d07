"""Load an engine and its tokenizer from a path or a name. transformers and torch are imported only when needed.

Weights are read from safetensors only; code shipped with a model is never run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from paceline.engine.base import Engine, LoadedModel, ModelInfo
from paceline.engine.model_config import sampling_defaults
from paceline.errors import ConfigError, PacelineError
from paceline.hub.cache import facts_of, find_gguf, has_torch
from paceline.hub.cache import find as find
from paceline.hub.cache import need_torch as need_torch
from paceline.hub.cache import quiet as quiet
from paceline.hub.cache import served_name as served_name
from paceline.hub.download import HubName
from paceline.hub.gguf import GgufModel, described, kept_as, sampled
from paceline.system import in_own_thread, may_have_gpu, usable_cores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.engine.paged.attention.backends import Attention
    from paceline.engine.weights import DType
    from paceline.hub.quantize import Quantization


log = logging.getLogger("paceline.engine")

Backend = Literal["auto", "hf", "llama_cpp", "paged"]


class EngineOptions(NamedTuple):
    """Options of `load_model` that concern the engine."""

    backend: Backend = "auto"
    dtype: DType = "auto"
    device: str = "auto"
    threads: int | None = None
    kv_rows: int | None = None
    kv_mib: int | None = None
    attention: Attention | None = None  # None: the device's, see `paged.attention.backends`
    graphs: bool | None = None  # replay forwards of few rows as CUDA graphs; None: on a GPU


DEFAULTS = EngineOptions()


def load_model(
    path_or_name: str | Path,
    *,
    backend: Backend = "auto",
    dtype: DType = "auto",
    device: str = "auto",
    threads: int | None = None,
    kv_rows: int | None = None,
    kv_mib: int | None = None,
    quantize: Quantization | None = None,
    name: str | None = None,
) -> LoadedModel:
    """Load `fake`, `fake:SEED`, `fake:SEED:SPREAD`, a directory, or a name on the Hugging Face hub.

    SPREAD: difference between the fake model's answers to two prompts, 0 to 1.
    dtype auto: bfloat16 on an accelerator, and on a CPU with native bfloat16 if the weights are stored in it; else
    float32, also for models under 100 million parameters, where bfloat16 saves no time and its rounding would change
    the text. Larger ones in half precision, and quantised ones, keep their weights in the file's format, of which rows
    are converted when they are used. threads: torch threads of the whole process; None: torch's own number, within
    `usable_cores`. kv_rows: rows of KV cache that all sequences share (paged, fake), kv_mib: their memory in MiB in
    place of their number; None for both takes most of what the weights leave on an accelerator, and a quarter of the
    free memory on a CPU, of which few rows stay filled for later prompts; the fake model then has no bound. quantize:
    the format to which weights in safetensors are converted, once, for llama.cpp. Raises ConfigError with a sentence
    that says what to do.
    """
    if fake := re.fullmatch(r"fake(?::(\d+))?(?::(0?\.\d+|[01]))?", str(path_or_name)):
        if quantize is not None:
            raise ConfigError("The fake model has no weights to convert: leave --quantize out.")
        from paceline.engine.fake import FAKE_ROWS_PER_MIB, SPREAD, fake_model

        rows = kv_mib * FAKE_ROWS_PER_MIB if kv_mib is not None and kv_rows is None else kv_rows
        return fake_model(int(fake[1] or 0), float(fake[2] or SPREAD), capacity_rows=rows)
    from paceline.engine.tokenizer import Tokenizer

    name = name or served_name(path_or_name)
    gguf = _for_llama_cpp(path_or_name, backend, device, quantize)
    if gguf is not None:
        from paceline.engine.llama_cpp.engine import load_gguf

        tokenizer = Tokenizer.load(gguf.folder)
        engine: Engine = load_gguf(gguf, name=name, threads=threads, kv_rows=kv_rows, kv_mib=kv_mib)
    else:
        directory = folder_of(path_or_name)
        tokenizer = Tokenizer.load(directory)  # before the weights, which take much longer
        options = EngineOptions(backend, dtype, device, threads, kv_rows, kv_mib)
        engine = _on_llama_cpp(directory, options, name) or load_engine(directory, options, name=name)
    if tokenizer.num_pieces > engine.info.vocab_size:
        raise ConfigError(
            f"{path_or_name} cannot be loaded: its tokenizer has {tokenizer.num_pieces} tokens, its model "
            f"{engine.info.vocab_size}. Its tokenizer.json is another model's."
        )
    return LoadedModel(engine, tokenizer)


def _on_llama_cpp(directory: Path, options: EngineOptions, name: str) -> Engine | None:
    """The model with a copy of its weights as they are, where that is faster on a CPU, and exact: those in half
    precision that torch would compute in float32 without our kernel. Without torch, all that llama.cpp can run. None
    for others, for options that name an engine or a format, and where a copy has no room."""
    from paceline.engine.llama_cpp.library import is_installed
    from paceline.hub.quantize import is_convertible, quantized

    is_named = options.backend != "auto" or options.dtype != "auto" or choose_device(options.device) != "cpu"
    if is_named or not is_installed() or not is_convertible(directory):
        return None
    if has_torch():
        import torch

        from paceline.engine import layer_kernel
        from paceline.engine.weights import format_of

        if layer_kernel.kernel() or not format_of("auto", torch.device("cpu"), directory).by_rows:
            return None
    from paceline.engine.llama_cpp.engine import load_gguf

    try:
        copied = quantized(directory, None)
        engine = load_gguf(copied, name=name, threads=options.threads, kv_rows=options.kv_rows, kv_mib=options.kv_mib)
    except PacelineError as error:  # such as too little room on the disk
        if not has_torch():
            raise
        log.warning("%s runs on torch, where it is slower: %s", name, error)
        return None
    return engine if engine.info.is_exact or not has_torch() else None


def folder_of(path_or_name: str | Path) -> Path:
    """As `find`, for what is no GGUF file that llama.cpp runs. Raises ConfigError also where nothing is installed that
    would run it, before it is fetched."""
    from paceline.engine.llama_cpp.library import is_installed

    if not (is_installed() or find_gguf(path_or_name) or Path(path_or_name).expanduser().is_dir()):
        name = HubName.parse(str(path_or_name))
        what = f"{name} is no GGUF file of this machine (`paceline models list` shows them), and one in safetensors"
        need_torch(what)
    return find(path_or_name)


def _for_llama_cpp(
    path_or_name: str | Path, backend: Backend, device: str, quantize: Quantization | None
) -> GgufModel | None:
    """The GGUF file to be run by llama.cpp; None for what another engine runs, after a conversion if it is one.

    Raises ConfigError where that engine is asked for, and cannot run the model.
    """
    if quantize is not None:
        return _quantized(path_or_name, backend, device, quantize)
    if backend in ("hf", "paged"):
        return None
    from paceline.engine.llama_cpp.library import is_installed

    file = find_gguf(path_or_name)
    if backend == "llama_cpp":
        if file is None:
            raise ConfigError(f"Backend llama_cpp runs GGUF files, and {path_or_name} is none. Use auto.")
        return described(file)
    return described(file) if file and is_installed() and choose_device(device) == "cpu" else None


def _quantized(path_or_name: str | Path, backend: Backend, device: str, quantize: Quantization) -> GgufModel:
    from paceline.hub.quantize import quantized

    said = f"--quantize converts {path_or_name} for llama.cpp"
    if backend in ("hf", "paged"):
        raise ConfigError(f"{said}, and backend {backend} was asked for: leave one of them out.")
    if choose_device(device) != "cpu":
        raise ConfigError(f"{said}, which computes on the CPU here: give --engine-device cpu, or leave it out.")
    if find_gguf(path_or_name) is not None:
        raise ConfigError(f"{path_or_name} is a GGUF file, whose weights stay as they are: leave --quantize out.")
    directory = find(path_or_name)
    return quantized(directory, quantize)


def fingerprint(directory: Path) -> str:
    """sha256 over the configuration and what `sampled` reads of each weight file."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    for key in ("_name_or_path", "transformers_version"):  # where the model was saved, not its identity
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.name.encode() + sampled(file))
    return digest.hexdigest()


def load_engine(directory: Path, options: EngineOptions = DEFAULTS, *, name: str) -> Engine:
    """Load the engine of a model directory, without a tokenizer. Raises ConfigError or EngineError."""
    from paceline.engine.reader.engine import is_reader, load_reader

    if is_reader(directory):
        choose_device(options.device)  # it computes on the CPU, yet a device that is not there is refused
        return load_reader(directory, name=name, fingerprint=fingerprint(directory))
    need_torch(f"The model {name}")
    import torch

    threads = options.threads or min(torch.get_num_threads(), usable_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return in_own_thread(partial(_load_on_torch, directory, options, name=name))


def _load_on_torch(directory: Path, options: EngineOptions, *, name: str) -> Engine:
    from paceline.engine.hf import HFEngine
    from paceline.engine.paged.engine import PagedEngine, paged_engine

    model, info = _model(directory, options, name=name)
    if options.backend != "hf":
        paged = paged_engine(
            model,
            info,
            kv_rows=options.kv_rows,
            kv_mib=options.kv_mib,
            attention=options.attention,
            graphs=options.graphs,
        )
        if isinstance(paged, PagedEngine):
            return paged
        if options.backend == "paged":
            raise ConfigError(
                f"{name} ({type(model).__name__}) cannot be served with backend paged: {paged}. Use auto or hf."
            )
        log.warning("%s (%s) is served by hf, slower than paged: %s", name, type(model).__name__, paged)
        model, info = _model(directory, options, name=name)  # `paged_engine` has changed the model
    return HFEngine(model, info)


def _model(directory: Path, options: EngineOptions, *, name: str) -> tuple[PreTrainedModel, ModelInfo]:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    from paceline.engine.model_config import max_positions, shape_of
    from paceline.engine.tensors import use_device
    from paceline.engine.weights import choose_format, num_weights_of, read_as_stored, tensors_of

    device = torch.device(choose_device(options.device))
    use_device(device)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            chosen = choose_format(options.dtype, device, config, directory)
            log.info("%s is computed in %s", name, chosen.text)
            if chosen.is_stored:
                read_as_stored(config, tensors_of(directory))
            loaded = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,  # read anew for every load: an engine changes it
                dtype=chosen.computed,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise ConfigError(
            f"{directory} cannot be loaded: a file of its weights is damaged or was cut ({error}). Fetch or copy it "
            "again."
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # bad files, unknown architectures and odd configurations raise errors of any type
        if str(error).startswith("Unrecognized configuration class"):  # and a list of all that there are
            raise ConfigError(
                f"{directory} cannot be loaded: models of the kind {config.model_type} do not continue a text. Give a "
                "causal language model."
            ) from error
        what = str(error)
        if "ignore_mismatched_sizes" in what:  # advice for who calls the library
            what = "its weights have other shapes than its config.json says, which may be another model's"
        elif isinstance(error, KeyError):
            what = f"its config.json lacks, or names, what is not known here: {error}"
        raise ConfigError(f"{directory} cannot be loaded: {what}") from error
    model, report = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s: %d tensors are no part of its architecture, such as %s", name, len(unused), unused[0])
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(f"{directory} lacks {len(missing)} tensors of its architecture, among them {missing[0]}")
    model.requires_grad_(False)
    num_weights = num_weights_of(model)
    chosen.adopt(model)
    torch.nn.Module.to(model, device)
    info = ModelInfo(
        name=name,
        fingerprint=fingerprint(directory),
        vocab_size=int(config.get_text_config().vocab_size),
        max_positions=max_positions(config),
        dtype=str(model.dtype).removeprefix("torch."),
        backend="hf",
        sampling=sampling_defaults(directory),
        num_weights=num_weights,
        shape=shape_of(config, {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}),
        accelerated=model.device.type != "cpu",
        kept_as=kept_as(directory),
    )
    return model, info


def choose_device(requested: str) -> str:
    """Where torch computes: `cpu` where it is not installed. Raises ConfigError for a device that is not there."""
    if requested == "cpu" or (requested == "auto" and not (may_have_gpu() and has_torch())):
        return "cpu"
    need_torch(f"device {requested}")
    import torch

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(requested)
        is_missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    except RuntimeError:
        is_missing = True
    if is_missing:
        raise ConfigError(f"device {requested} was asked for, but torch has no such device here. Use cpu or auto.")
    return requested


def gpu_uuid(device: str) -> str | None:
    """The GPU's own name, which does not depend on how programs number GPUs; None where torch does not tell it."""
    import torch

    properties = torch.cuda.get_device_properties(torch.device(device))
    return str(uuid) if (uuid := getattr(properties, "uuid", None)) else None


@dataclass(frozen=True, slots=True)
class Description:
    """A model from its configuration alone, before its weights are loaded."""

    info: ModelInfo  # number format, backend and number of weights are empty: they are known once it is loaded
    tokenizer: str  # its fingerprint
    weights: int  # bytes of them on the disk; 0: they are none


def describe_model(
    path_or_name: str | Path,
    *,
    name: str,
    backend: Backend = "auto",
    device: str = "auto",
    quantize: Quantization | None = None,
) -> Description:
    """The model as `load_model` will find it with these options. One of the hub is fetched first, and converted.

    Raises ConfigError for what is no model that can be loaded.
    """
    if re.fullmatch(r"fake(:.*)?", str(path_or_name)):
        fake = load_model(path_or_name)
        return Description(replace(fake.engine.info, name=name), fake.tokenizer.fingerprint, 0)
    from paceline.engine.tokenizer import Tokenizer

    if (gguf := _for_llama_cpp(path_or_name, backend, device, quantize)) is not None:
        tokenizer = Tokenizer.load(gguf.folder)
        info = ModelInfo(name, gguf.fingerprint, tokenizer.vocab_size, gguf.context, dtype="", backend="")
        return Description(info, tokenizer.fingerprint, gguf.path.stat().st_size)
    directory = folder_of(path_or_name)
    tokenizer, facts = Tokenizer.load(directory), facts_of(directory)
    is_reader = facts.kind == "reader"  # no architecture of transformers
    positions, vocabulary = (facts.context or 0, tokenizer.vocab_size) if is_reader else _configured(directory)
    info = ModelInfo(
        name,
        fingerprint(directory),
        vocabulary,
        positions,
        dtype="",
        backend="",
        sampling=sampling_defaults(directory),
        thinking=tokenizer.thinking,
        tools=tokenizer.tools,
    )
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return Description(info, tokenizer.fingerprint, weights)


def _configured(directory: Path) -> tuple[int, int]:
    """(positions, size of the vocabulary)"""
    need_torch(f"The model in {directory}")
    from transformers import AutoConfig

    from paceline.engine.model_config import max_positions

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return max_positions(config), int(config.get_text_config().vocab_size)
    except Exception as error:  # unknown architectures and odd configurations raise errors of any type
        raise ConfigError(f"{directory} cannot be loaded: {error}") from error
