"""Folders of safetensors as GGUF files, quantised or as they are: the inverse of `hub/gguf.py`, by its tables.

Norms and biases become float32, and so do the few weights whose rows are not whole blocks. Embedding and output have 8
bits in every quantised format. The file holds no vocabulary: its reader is this program, which takes the folder's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.hub.download import FILE, path_part
from paceline.hub.gguf import (
    ARCHITECTURES,
    CAPS,
    NUMBERS,
    SIZES,
    SUFFIX,
    Architecture,
    Floats,
    GgufModel,
    cache,
    described,
    kept_as,
    llama3_divisors,
)
from paceline.system import lock

log = logging.getLogger("paceline.engine")

Quantization = Literal["q8_0", "q4_0"]

_VERSION: Final = 1  # of what is written; files of another one are written anew
_BLOCK: Final = 32  # numbers of a row with one scale
_PART: Final = 1 << 24  # numbers that are quantised at once
_FINE: Final = frozenset({"token_embd.weight", "output.weight"})
_TYPES: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_FORMATS: Final = {"f4": "f32", "f2": "f16", "u2": "bf16"}  # by numpy's kinds
_OLD_NAMES: Final = ("rotary_emb.inv_freq", "masked_bias")  # tensors that follow from the configuration
_ACTIVATIONS: Final = {"llama": "silu", "qwen2": "silu", "qwen3": "silu"}
# Of rotary embeddings: what llama.cpp is told, besides their base.
_ROPE: Final[Mapping[str, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}


def is_convertible(folder: Path) -> bool:
    """Whether llama.cpp can run the folder's model, once it is converted."""
    try:
        config = _config(folder)
        _, architecture = _architecture(folder, config)
        _header(folder, config), _rope(folder, config), list(_tensors(folder, architecture, config))
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError):  # a header may say anything
        return False
    return True


def quantized(folder: Path, kind: Quantization | None) -> GgufModel:
    """The model of a folder in this format, in the cache, written at its first use. kind: None for its own.

    Another process that is at it is waited for. Raises ConfigError for a model that cannot be written so.
    """
    name = f"{hashlib.sha256(f'{kept_as(folder)} {_VERSION}'.encode()).hexdigest()}.{kind or 'stored'}{SUFFIX}"
    file = cache() / "quantized" / path_part(name, FILE)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as held:
            while not file.exists():
                if lock(held.fileno(), alone=True):
                    log.info("%s is converted to %s once, in %s", folder, kind or "llama.cpp's format", file)
                    _write_whole(folder, file, kind)
                else:
                    log.info("another process converts %s for llama.cpp", folder)
                    lock(held.fileno(), alone=False)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be converted to {file}: {error}") from error
    return described(file, folder)


def _write_whole(folder: Path, file: Path, kind: Quantization | None) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        write_quantized(folder, part, kind)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def write_quantized(folder: Path, file: Path, kind: Quantization | None) -> None:
    """Write the folder's weights to a GGUF file, a tensor after another. Raises ConfigError and OSError."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("Quantised weights need one more package: pip install 'paceline[gguf]'") from error
    config = _config(folder)
    name, architecture = _architecture(folder, config)
    scaling, divisors = _rope(folder, config)
    tensors = list(_tensors(folder, architecture, config))
    writer = gguf.GGUFWriter(file, name)
    most = (kind or _FORMATS[max(tensors, key=lambda each: each.values.size).values.dtype.str[1:]]).upper()
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if most == 'F32' else 'MOSTLY'}_{most}"])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(next(each.shape[0] for each in tensors if each.name == "token_embd.weight"))
    for key, value in _header(folder, config).items():
        if isinstance(value, float):
            writer.add_float32(f"{name}.{key}", value)
        else:
            writer.add_uint32(f"{name}.{key}", value)
    if "rope_type" in scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if "original_max_position_embeddings" in scaling:
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
    kinds = [gguf.GGMLQuantizationType[_kind(each, kind).upper()] for each in tensors]
    for each, own in zip(tensors, kinds, strict=True):
        block, size = gguf.GGML_QUANT_SIZES[own]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), math.prod(each.shape) // block * size, own)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors)
        for each, own in zip(tensors, kinds, strict=True):
            writer.write_tensor_data(np.concatenate([gguf.quantize(rows, own) for rows in each.floats()]))
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the folder, mapped, under its name in the file."""

    name: str
    values: NDArray[Any]  # as stored: bfloat16 as integers
    heads: int = 0  # whose rows are put in llama.cpp's order of rotary embeddings
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def floats(self) -> Iterator[Floats]:
        """Its rows in the file's order, some at a time."""
        values = self.values
        if self.heads:  # pairs side by side, in place of both halves apart
            halves = values.reshape(self.heads, 2, values.shape[0] // self.heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        step = max(1, _PART // math.prod(values.shape[1:]))
        for first in range(0, len(values), step):
            part = values[first : first + step]
            if part.dtype == np.uint16:
                part = (part.astype(np.uint32) << 16).view(np.float32)
            yield part.astype(np.float32) + np.float32(self.offset)


def _kind(tensor: _Tensor, kind: Quantization | None) -> str:
    if len(tensor.shape) == 1 or (kind and tensor.shape[-1] % _BLOCK):
        return "f32"
    if kind is None:
        return _FORMATS[tensor.values.dtype.str[1:]]
    return "q8_0" if tensor.name in _FINE else kind


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{folder / 'config.json'} is not the configuration of a model.")
    return content


def _architecture(folder: Path, config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Name in the file, and what it means. Raises ConfigError for a model that llama.cpp would compute otherwise."""
    kind = config.get("model_type")
    known = {each.model_type: name for name, each in ARCHITECTURES.items()} | {"mistral": "llama"}
    if kind not in known:
        raise _refused(folder, f"its architecture {kind} is not known here; known are {', '.join(known)}")
    name = known[kind]
    activation = config.get("hidden_act")
    heads = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    windowed = kind == "gemma2" or config.get("use_sliding_window", kind == "mistral") is False
    faults = {
        "its weights are quantised already": config.get("quantization_config") is not None,
        "its attention has a window": bool(config.get("sliding_window")) and not windowed and kind == "mistral",
        "its attention has windows in some layers": config.get("use_sliding_window") is True,
        f"its activation is {activation}": activation not in (None, _ACTIVATIONS.get(name, activation)),
        "its rotary embeddings cover a part of each head": config.get("partial_rotary_factor", 1.0) != 1.0,
        "its queries are scaled in a way of their own": config.get("query_pre_attn_scalar", heads) != heads,
        "its attention has biases": kind == "qwen3" and bool(config.get("attention_bias")),
        "its output has weights of its own": kind == "gemma2" and config.get("tie_word_embeddings") is False,
    }
    if fault := next((text for text, holds in faults.items() if holds), None):
        raise _refused(folder, fault)
    return name, ARCHITECTURES[name]


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder} cannot be converted for llama.cpp: {why}. Leave --quantize out.")


def _header(folder: Path, config: Mapping[str, Any]) -> Mapping[str, int | float]:
    """Sizes and numbers by their names in the file, without the architecture's prefix. Raises ConfigError."""
    rope = config.get("rope_parameters") or {}
    own = {key: value for key, value in config.items() if value is not None}
    try:
        size = own["hidden_size"] // own["num_attention_heads"]
        given = {"num_key_value_heads": own["num_attention_heads"], "head_dim": size, "rope_theta": 10000.0} | own
        given |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        found: dict[str, int | float] = {name: int(given[key]) for key, name in SIZES.items()}
        found |= {name: float(given[key]) for key, name in NUMBERS.items()}
    except KeyError as error:
        raise _refused(folder, f"its config.json lacks {error.args[0]}") from error
    if config.get("model_type") == "gemma2":
        found |= {name: type(default)(own.get(key, default)) for key, (name, default) in CAPS.items()}
    size = int(given["head_dim"])
    return found | {"attention.value_length": size, "rope.dimension_count": size}


def _rope(folder: Path, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Floats | None]:
    """Scaling of rotary embeddings as the file names it, and divisors of their frequencies. Raises ConfigError."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    base = found.pop("rope_theta", config.get("rope_theta", 10000.0))
    found = {key: value for key, value in found.items() if value is not None and key != "type"}
    is_theirs = kind != "llama3" or config.get("model_type") in ("llama", "mistral")
    if kind not in _ROPE or found.keys() != _ROPE[kind] or not is_theirs:
        said = ", ".join(sorted(found))
        raise _refused(folder, f"its rotary embeddings are scaled as {kind}" + (f" with {said}" if said else ""))
    if kind == "llama3":
        factor, low, high = (found[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        original = found["original_max_position_embeddings"]
        return {}, llama3_divisors(size, base, factor, low, high, original)
    return ({"rope_type": kind} | found if kind != "default" else {}), None


def _tensors(folder: Path, architecture: Architecture, config: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Raises ConfigError for one that has no place in the file."""
    heads = config["num_attention_heads"]
    heads_of = {"q_proj": heads, "k_proj": config.get("num_key_value_heads") or heads} if architecture.permuted else {}
    for name, values in _stored(folder):
        if name.endswith(_OLD_NAMES) or (name.startswith("lm_head.") and config.get("tie_word_embeddings")):
            continue
        own = architecture.stored(name)
        if own is None:
            raise _refused(folder, f"what to do with its tensor {name} is not known here")
        stem = name.split(".")[-2]
        offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
        yield _Tensor(own, values, heads_of.get(stem, 0), offset)


def _stored(folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Each tensor of the folder, mapped. Raises ConfigError for a file that is damaged, or of another number format."""
    for file in sorted(folder.glob("*.safetensors")):
        begin, header = header_of(file)
        for name, about in header.items():
            if about["dtype"] not in _TYPES:
                raise _refused(folder, f"its weights are in {about['dtype']}")
            shape, (first, last) = about["shape"], about["data_offsets"]
            size = math.prod(shape) * np.dtype(_TYPES[about["dtype"]]).itemsize
            if not 0 <= first < last == first + size or begin + last > file.stat().st_size:
                raise ConfigError(f"{file} was cut: fetch or copy it again.")
            yield name, np.memmap(file, _TYPES[about["dtype"]], "r", begin + first, tuple(shape))


def header_of(file: Path) -> tuple[int, Mapping[str, Mapping[str, Any]]]:
    """Of safetensors: the byte at which the tensors begin, and what is said of each. Raises ConfigError."""
    with file.open("rb") as stream:
        begin = 8 + int.from_bytes(stream.read(8), "little")
        try:
            if begin > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Mapping[str, Any]] = json.loads(stream.read(begin - 8))
        except ValueError as error:
            raise ConfigError(f"{file} is damaged or was cut: fetch or copy it again.") from error
    header.pop("__metadata__", None)
    return begin, header
