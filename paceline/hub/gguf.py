"""Models in GGUF files, as LM Studio, Ollama and llama.cpp keep them: read, and written as a folder of safetensors.

One reading of vocabulary, merges and chat template serves every engine, so two sides with the same model have the same
tokenizer whichever file each of them has. The package `gguf` reads the container and defines how blocks of quantised
numbers are decoded; what the tensors of an architecture mean is below.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.hub.download import SHA256, path_part
from paceline.secret_files import make_folder, write_private

if TYPE_CHECKING:
    import gguf
    import tokenizers

Floats = NDArray[np.float32]

log = logging.getLogger("paceline.engine")

SUFFIX: Final = ".gguf"
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NOT_COMPUTED: Final = frozenset({"F64", "I8", "I16", "I64"})  # kinds of tensors by llama.cpp, which then aborts
_SPLIT_FILE: Final = "-of-0"  # in the names of models of several files
_LONGEST_PIECE: Final = 1024  # characters: each piece is cut everywhere, which takes its length squared
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # `tokenizer.ggml.token_type`

# How text is divided before merges are applied, by `tokenizer.ggml.pre`.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(after)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(after)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), _WORDS % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _WORDS % ""),
    **dict.fromkeys(("gpt-4o", "llama4"), _CASED % {"after": f"{_CONTRACTIONS}?", "digits": "{1,3}"}),
    "tekken": _CASED % {"after": "", "digits": ""},
}
_DIGITS_APART: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_BYTE_LEVEL: Final = frozenset({"gpt-2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the tensors of an architecture are called in transformers, and how its configuration is."""

    model_type: str
    class_name: str
    permuted: bool = False  # rows of queries and keys are in llama.cpp's order of rotary embeddings
    norm_offset: float = 0.0  # that the file adds to the weights of norms
    config: Mapping[str, object] = field(default_factory=dict)  # further fields
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors, besides the common ones

    @property
    def inner(self) -> Mapping[str, str]:
        """Names of a layer's tensors by those of the file."""
        return {**_COMMON, **self.names}

    def stored(self, name: str) -> str | None:
        """Name in the file of a tensor of transformers; None for one that is not known here."""
        stem, _, ending = name.rpartition(".")
        outer = {theirs: own for own, theirs in _OUTER.items()}
        if stem in outer:
            return f"{outer[stem]}.{ending}"
        layer = _LAYER.fullmatch(stem)
        own = {theirs: own for own, theirs in self.inner.items()}.get(layer[2]) if layer else None
        return f"blk.{layer[1]}.{own}.{ending}" if layer and own else None


_POST_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "gemma": Architecture(
        "gemma", "GemmaForCausalLM", norm_offset=1.0, config={"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        norm_offset=1.0,
        config={"hidden_activation": "gelu_pytorch_tanh"},
        names=_POST_NORMS,
    ),
}
_COMMON: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SIZES: Final = {  # of `config.json`, and what the file calls them
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
NUMBERS: Final = {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
CAPS: Final = {  # of Gemma 2, and what they are where nothing is said
    "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    "sliding_window": ("attention.sliding_window", 4096),
}


def llama3_divisors(size: int, base: float, factor: float, low: float, high: float, original: int) -> Floats:
    """Divisors of the frequencies of rotary embeddings, as Llama 3.1 scales them: (size / 2,)"""
    wavelengths = 2 * math.pi * base ** (np.arange(0, size, 2) * (1 / size))
    blend = np.clip((1 / wavelengths * original - low) * (1 / (high - low)), 0, 1)
    return (1 / ((1 - blend) * (1 / factor) + blend)).astype(np.float32)


class GgufFile:
    """A file whose fields are read and whose tensors are mapped, to be decoded one at a time."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._reader = reader
        self._fields: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Raises ConfigError for what is no GGUF file of a model that can be read here."""
        try:
            import gguf
        except ImportError as error:
            raise ConfigError("A GGUF file needs one more package: pip install 'paceline[gguf]'") from error
        try:
            file = cls(path, gguf.GGUFReader(path))
            file.get("general.architecture")
        except Exception as error:  # the reader trusts the file: offsets and counts that are none raise anything
            fault = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path} cannot be read as a GGUF file: it is another kind of file, damaged or cut off ({fault})."
            ) from error
        if _SPLIT_FILE in path.name and int(file.get("split.count", 1)) > 1:
            raise ConfigError(f"{path} is one of several files of a model: join them with llama-gguf-split --merge.")
        return file

    def get(self, name: str, default: object = None) -> Any:
        """The value of a field, with `{arch}` for the architecture's prefix. Raises KeyError without a default."""
        if "{arch}" in name:
            name = name.format(arch=self.get("general.architecture"))
        if name not in self._fields:
            found = self._reader.fields.get(name)
            if found is None and default is None:
                raise KeyError(name)
            self._fields[name] = default if found is None else found.contents()
        return self._fields[name]

    @property
    def architecture(self) -> Architecture:
        """Raises ConfigError for one that is not known here."""
        name = self.get("general.architecture")
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{self.path} holds a model of the architecture {name}; known here are {known}.")
        return ARCHITECTURES[name]

    @property
    def number_format(self) -> str:
        """Of most weights, as `q4_k_m`."""
        import gguf

        kind = self.get("general.file_type", -1)
        if kind in {each.value for each in gguf.LlamaFileType}:
            return gguf.LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_").lower()
        return max(self._reader.tensors, key=lambda tensor: int(tensor.n_elements)).tensor_type.name.lower()

    @property
    def row_bytes(self) -> int:
        """Of a token's keys and values in all layers, in float16."""
        layers, heads = int(self.get("{arch}.block_count")), int(self.get("{arch}.attention.head_count"))
        kv_heads = self.get("{arch}.attention.head_count_kv", heads)
        size = int(self.get("{arch}.embedding_length")) // heads
        sizes = [int(self.get(f"{{arch}}.attention.{kind}_length", size)) for kind in ("key", "value")]
        return 2 * sum(sizes) * (sum(kv_heads) if isinstance(kv_heads, Sequence) else layers * int(kv_heads))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes of each tensor by its name in the file, the slowest axis first."""
        return {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in self._reader.tensors}

    def config(self) -> dict[str, object]:
        """`config.json` as transformers reads it. Raises ConfigError for what it could not say."""
        heads = int(self.get("{arch}.attention.head_count"))
        hidden = int(self.get("{arch}.embedding_length"))
        kv_heads = self.get("{arch}.attention.head_count_kv", heads)
        if isinstance(kv_heads, Sequence):
            if len(set(kv_heads)) > 1:
                raise ConfigError(f"{self.path}: layers with different numbers of heads are not known here.")
            kv_heads = kv_heads[0]
        names, size = self.shapes, hidden // heads
        given = {"num_key_value_heads": kv_heads, "head_dim": size, "rope_theta": 10000.0}
        config: dict[str, object] = {
            "architectures": [self.architecture.class_name],
            "model_type": self.architecture.model_type,
            "vocab_size": names["token_embd.weight"][0],
            **{key: int(self.get(f"{{arch}}.{name}", given.get(key))) for key, name in SIZES.items()},
            "num_key_value_heads": int(kv_heads),
            **{key: float(self.get(f"{{arch}}.{name}", given.get(key))) for key, name in NUMBERS.items()},
            "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": "float16",
            **self.architecture.config,
        }
        if self.architecture.model_type == "llama":
            config |= {"attention_bias": "blk.0.attn_q.bias" in names, "mlp_bias": "blk.0.ffn_up.bias" in names}
        if self.architecture.model_type == "gemma2":
            config |= {key: self.get(f"{{arch}}.{name}", default) for key, (name, default) in CAPS.items()}
            config["query_pre_attn_scalar"] = size if config["num_hidden_layers"] == 46 else config["head_dim"]  # 27B
        if scaling := self._rope_scaling():
            config["rope_scaling"] = scaling
        ends = self._ends()
        return config | {"eos_token_id": ends if len(ends) != 1 else ends[0], "bos_token_id": self._special("bos")}

    def _rope_scaling(self) -> Mapping[str, object] | None:
        if "rope_freqs.weight" in self.shapes:
            return self._llama3_scaling()
        kind = self.get("{arch}.rope.scaling.type", "none")
        if kind in ("none", ""):
            return None
        if kind not in ("linear", "yarn"):
            raise ConfigError(f"{self.path}: rotary embeddings scaled by {kind!r} are not known here.")
        scaling: dict[str, object] = {"rope_type": kind, "factor": float(self.get("{arch}.rope.scaling.factor", 1.0))}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = int(self.get("{arch}.rope.scaling.original_context_length"))
        return scaling

    def _llama3_scaling(self) -> Mapping[str, object]:
        """Llama 3.1's scaling, of which the file keeps the divisor of each frequency: one that gives these divisors.

        The wavelengths between which it is blended are the model family's constants. Raises ConfigError otherwise.
        """
        (divisors,) = (self._decoded(tensor) for tensor in self._reader.tensors if tensor.name == "rope_freqs.weight")
        size = int(self.get("{arch}.rope.dimension_count"))
        base = float(self.get("{arch}.rope.freq_base", 10000.0))
        factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
        if not np.allclose(llama3_divisors(size, base, factor, low, high, original), divisors, rtol=1e-3):
            raise ConfigError(f"{self.path}: its rotary embeddings are scaled in a way that is not known here.")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def _special(self, name: str) -> int | None:
        found = self.get(f"tokenizer.ggml.{name}_token_id", -1)
        return int(found) if 0 <= int(found) < len(self.get("tokenizer.ggml.tokens")) else None

    def _ends(self) -> list[int]:
        """Tokens that end an answer: of the text, and of a turn."""
        return list(dict.fromkeys(found for name in ("eos", "eot") if (found := self._special(name)) is not None))

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The vocabulary with its merges. Raises ConfigError for a kind that is not known here."""
        kind = self.get("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise ConfigError(f"{self.path}: vocabularies of the kind {kind!r} are not known here.")
        try:
            made = self._byte_level() if kind == "gpt2" else self._sentencepiece()
            self._add_special(made)
        except (ConfigError, KeyError):
            raise
        except Exception as error:  # the library raises bare Exception for pieces that do not fit together
            raise ConfigError(f"{self.path}: its vocabulary cannot be used: {error}") from error
        return made

    def _vocabulary(self) -> dict[str, int]:
        """Ids by name, without what only fills the embedding."""
        kinds = self.get("tokenizer.ggml.token_type", [])
        return {
            token: index
            for index, token in enumerate(self.get("tokenizer.ggml.tokens"))
            if not kinds or kinds[index] != _UNUSED
        }

    def _byte_level(self) -> tokenizers.Tokenizer:
        """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        merges = [tuple(pair.split(" ", 1)) for pair in self.get("tokenizer.ggml.merges")]
        pre = self.get("tokenizer.ggml.pre", "default")
        ignore = pre in ("llama-bpe", "llama3", "llama-v3", "llama4", "gpt-4o", "tekken")
        made = Tokenizer(models.BPE(self._vocabulary(), merges, ignore_merges=ignore))
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _PATTERNS)
        if pre in _PATTERNS:
            split = pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated")
            made.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
        elif pre in _DIGITS_APART:
            made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
        elif pre in _BYTE_LEVEL:
            made.pre_tokenizer = by_bytes
        else:
            raise ConfigError(f"{self.path}: text divided as {pre!r} says is not known here.")
        if pre == "qwen2":
            made.normalizer = normalizers.NFC()
        made.decoder = decoders.ByteLevel()
        return made

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        """SentencePiece's BPE, as of Llama 2, Mistral and Gemma: merges follow from the scores of the pieces."""
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

        vocabulary = self._vocabulary()
        scores = self.get("tokenizer.ggml.scores")
        kinds = self.get("tokenizer.ggml.token_type")
        pieces = {token: index for token, index in vocabulary.items() if kinds[index] == _NORMAL}
        if (longest := max(map(len, pieces), default=0)) > _LONGEST_PIECE:
            raise ConfigError(f"{self.path} has a word of {longest} characters in its vocabulary: take another.")
        merges = []
        for token, index in pieces.items():
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            found = [(left, right) for left, right in halves if left in pieces and right in pieces]
            merges += [(-scores[index], vocabulary[left], vocabulary[right], left, right) for left, right in found]
        pairs = [(left, right) for *_, left, right in sorted(merges)]
        unknown = self._special("unknown")
        name = self.get("tokenizer.ggml.tokens")[unknown] if unknown is not None else None
        made = Tokenizer(models.BPE(vocabulary, pairs, unk_token=name, fuse_unk=True, byte_fallback=True))
        space = "\u2581"
        if self.get("tokenizer.ggml.add_space_prefix", True):
            made.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
            strip = [decoders.Strip(" ", left=1)]
        else:
            made.normalizer = normalizers.Replace(" ", space)
            strip = []
        made.pre_tokenizer = pre_tokenizers.Sequence([])
        made.decoder = decoders.Sequence(
            [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return made

    def _add_special(self, made: tokenizers.Tokenizer) -> None:
        from tokenizers import AddedToken, processors

        kinds = self.get("tokenizer.ggml.token_type", [])
        for index, token in enumerate(self.get("tokenizer.ggml.tokens")):
            if kinds and kinds[index] in (_CONTROL, _USER_DEFINED):
                added = AddedToken(token, normalized=False, special=kinds[index] == _CONTROL)
                (made.add_special_tokens if added.special else made.add_tokens)([added])
        bos = self._special("bos")
        default = self.get("tokenizer.ggml.model") == "llama"
        if bos is not None and self.get("tokenizer.ggml.add_bos_token", default):
            name = self.get("tokenizer.ggml.tokens")[bos]
            made.post_processor = processors.TemplateProcessing(
                single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, bos)]
            )

    def tokenizer_config(self) -> dict[str, object]:
        """`tokenizer_config.json`: the names of special tokens, without the chat template."""
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        tokens = self.get("tokenizer.ggml.tokens")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(self.get("{arch}.context_length")),
            **{key: tokens[found] for key, name in names.items() if (found := self._special(name)) is not None},
        }

    @property
    def template(self) -> str | None:
        """The chat template; None for a base model."""
        return self.get("tokenizer.chat_template", "") or None

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Each weight under the name of transformers, decoded, in the order of the file. Raises ConfigError."""
        for tensor in self._reader.tensors:
            name = self._name(tensor.name)
            if name is None:
                continue
            values = self._decoded(tensor)
            if self.architecture.permuted and (".q_proj." in name or ".k_proj." in name):
                values = self._unpermuted(name, values)
            if self.architecture.norm_offset and name.endswith("norm.weight"):
                values = values - np.float32(self.architecture.norm_offset)
            yield name, values

    def _name(self, name: str) -> str | None:
        """The name in transformers; None for a tensor that it has no use for."""
        if name == "rope_freqs.weight":
            return None
        stem, _, ending = name.rpartition(".")
        if stem in _OUTER:
            return f"{_OUTER[stem]}.{ending}"
        parts = stem.split(".", 2)
        inner = self.architecture.inner.get(parts[2]) if len(parts) == 3 and parts[0] == "blk" else None
        if inner is None:
            raise ConfigError(f"{self.path}: what to do with its tensor {name} is not known here.")
        return f"model.layers.{parts[1]}.{inner}.{ending}"

    def _decoded(self, tensor: gguf.ReaderTensor) -> Floats:
        import gguf

        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        return np.asarray(values, np.float32).reshape(self.shapes[tensor.name])

    def _unpermuted(self, name: str, values: Floats) -> Floats:
        """Rows of each head as transformers rotates them: both halves apart, in place of pairs side by side."""
        kind = "head_count_kv" if ".k_proj." in name else "head_count"
        heads = int(self.get(f"{{arch}}.attention.{kind}", self.get("{arch}.attention.head_count")))
        return values.reshape(heads, values.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def cache() -> Path:
    """Where folders made of files lie, and files made of folders."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def converted(path: Path) -> Path:
    """The folder of a GGUF file's model in the cache, written at its first use. Raises ConfigError."""
    folder = cache() / "gguf" / path_part(kept_as(path), SHA256)
    if not folder.is_dir():
        import_gguf(path, folder)
    return folder


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A file whose weights stay where they are."""

    path: Path
    folder: Path  # its vocabulary and chat template, for `Tokenizer`
    fingerprint: str
    context: int  # tokens
    row_bytes: int
    number_format: str
    grows: bool  # False where rotary embeddings depend on how many rows there may be


def described(path: Path, vocabulary: Path | None = None) -> GgufModel:
    """The model of a GGUF file, with its vocabulary in the cache, written at its first use, or in the given folder.

    Raises ConfigError.
    """
    if vocabulary is not None:
        return GgufModel(path, vocabulary, fingerprint(path), **_facts(GgufFile.open(path)))
    # Folders of one form: those of other releases are left alone.
    folder = cache() / "gguf-vocabulary-2" / path_part(kept_as(path), SHA256)
    if not folder.is_dir():
        file = GgufFile.open(path)
        with _appearing(folder, path) as part:
            ends = file._ends()
            _write_vocabulary(part, file)
            _write_json(part / "config.json", {"eos_token_id": ends, "bos_token_id": file._special("bos")})
            _write_json(part / "facts.json", _facts(file))
    return GgufModel(path, folder, fingerprint(path), **json.loads((folder / "facts.json").read_text("utf-8")))


def _facts(file: GgufFile) -> dict[str, Any]:
    """Raises ConfigError for weights of which llama.cpp would not fail but end the process."""
    for tensor in file._reader.tensors:
        if (kind := tensor.tensor_type.name) in _NOT_COMPUTED:
            raise ConfigError(f"{file.path}: llama.cpp does not compute with {kind}, as {tensor.name} is.")
    return {
        "context": int(file.get("{arch}.context_length")),
        "row_bytes": file.row_bytes,
        "number_format": file.number_format,
        "grows": not any(name.startswith("rope_factors_") for name in file.shapes),
    }


_BEGINNING: Final = 16 << 20  # bytes that are read whole: headers, vocabularies, templates
_SAMPLES: Final = 1024  # of what follows, evenly
_SAMPLE: Final = 4096  # bytes of each


def sampled(path: Path, secret: bytes = b"") -> bytes:
    """sha256 over the size of a file of weights, its beginning, and samples up to its end: fast for any size.

    Two files of one size may have the same if they differ in less than two thousandths of their bytes, in one place, or
    without a secret, by which the places are drawn, if one was made so.
    """
    size = path.stat().st_size
    rest, digest = max(0, size - _BEGINNING - _SAMPLE), hashlib.sha256(b"%d" % size)
    drawn = struct.unpack(f"<{_SAMPLES}Q", hashlib.shake_256(secret).digest(8 * _SAMPLES))
    places = [rest * each >> 64 for each in drawn] if secret else [rest * n // (_SAMPLES - 1) for n in range(_SAMPLES)]
    with path.open("rb", buffering=0) as stream:
        digest.update(stream.read(_BEGINNING))
        for place in places if size > _BEGINNING else ():
            stream.seek(_BEGINNING + place)
            digest.update(stream.read(_SAMPLE))
    return digest.digest()


def fingerprint(path: Path) -> str:
    """sha256 over what `sampled` reads of the file."""
    return hashlib.sha256(b"gguf" + sampled(path)).hexdigest()


def kept_as(model: Path) -> str:
    """The name under which this machine keeps what it makes of a model's file or folder: no file can be made to have
    that of another, since the places that are looked at are this machine's secret."""
    key, secret = cache() / "samples.key", b""
    with suppress(OSError):  # where nothing can be kept
        make_folder(key.parent)
        write_private(key, secrets.token_bytes(32), replace=False)
        secret = key.read_bytes()
    files = [model / "config.json", *sorted(model.glob("*.safetensors"))] if model.is_dir() else [model]
    return hashlib.sha256(b"".join(sampled(file, secret) for file in files)).hexdigest()


def import_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a folder that transformers and every engine here read.

    Weights are decoded to float16, in which each decoded value of the usual blocks fits but for its last bits; norms
    stay float32. The folder appears whole or not at all. Raises ConfigError.
    """
    file = GgufFile.open(path)
    log.info("%s is converted to safetensors once, in %s", path, folder)
    with _appearing(folder, path) as part:
        _write_json(part / "config.json", file.config())
        _write_vocabulary(part, file)
        _write_weights(part / "model.safetensors", file)


@contextmanager
def _appearing(folder: Path, path: Path) -> Iterator[Path]:
    """A folder to write to, which is `folder` afterwards. Raises ConfigError."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        part.mkdir(parents=True)
        yield part
        if not folder.exists():  # another process may have been quicker
            part.replace(folder)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the field {error.args[0]}.") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_vocabulary(folder: Path, file: GgufFile) -> None:
    _write_json(folder / "tokenizer_config.json", file.tokenizer_config())
    if template := file.template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    file.tokenizer().save(str(folder / "tokenizer.json"))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2), "utf-8")


def _write_weights(path: Path, file: GgufFile) -> None:
    """One tensor after another, so that the memory of one is enough for a model of any size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored, shape in file.shapes.items():
        if (name := file._name(stored)) is not None:
            begin, end = end, end + math.prod(shape) * _type(name)[1]().itemsize
            header[name] = {"dtype": _type(name)[0], "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, values in file.tensors():
            out.write(np.ascontiguousarray(values, _type(name)[1]).tobytes())


def _type(name: str) -> tuple[str, type[np.float16 | np.float32]]:
    return ("F32", np.float32) if name.endswith("norm.weight") else ("F16", np.float16)
