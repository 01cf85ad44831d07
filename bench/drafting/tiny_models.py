"""Trained, very small language models: checkpoints in the llama2.c format, read into transformers' Llama.

Supports versions 0 (float32) and 2 (int8 in groups with a float32 scale each) of the format; no code in a file is run.
The tokenizer is the format's own: pieces with scores, merged best first.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.engine.base import Engine, ModelInfo
from paceline.engine.paged.engine import PagedEngine, paged_engine
from paceline.errors import ConfigError

BOS: Final = 1
EOS: Final = 2
_QUANTISED: Final = 0x616B3432
_HEADER: Final = 256  # bytes of a quantised file's header
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinyModel:
    name: str
    engine: Engine
    pieces: dict[bytes, int]
    scores: tuple[float, ...]

    def encode(self, text: str) -> list[int]:
        """BOS, then the text with a leading blank: single characters, then repeatedly the merge with the best score."""
        ids = []
        for character in " " + text:
            data = character.encode()
            ids += [self.pieces[data]] if data in self.pieces else [byte + 3 for byte in data]
        by_id = {token: piece for piece, token in self.pieces.items()}
        while True:
            best, position = -np.inf, -1
            for i in range(len(ids) - 1):
                merged = self.pieces.get(by_id.get(ids[i], b"\0") + by_id.get(ids[i + 1], b"\0"))
                if merged is not None and self.scores[merged] > best:
                    best, position = self.scores[merged], i
            if position < 0:
                return [BOS, *ids]
            ids[position : position + 2] = [self.pieces[by_id[ids[position]] + by_id[ids[position + 1]]]]


def tiny_models(data: Path) -> list[TinyModel]:
    """Models in the data folder. Raises ConfigError for files of another format."""
    folder = data / "tiny_models"
    known = [("stories260K", "stories260K.bin", "tok512.bin"), ("stories3M", "stories3M-q80.bin", "tok4096.bin")]
    return [
        _load(name, folder / name / weights, folder / name / tokens)
        for name, weights, tokens in known
        if (folder / name / weights).is_file()
    ]


def _load(name: str, weights: Path, tokens: Path) -> TinyModel:
    data = weights.read_bytes()
    try:
        model = _quantised(data) if struct.unpack_from("<I", data)[0] == _QUANTISED else _plain(data)
        vocab = int(model.config.vocab_size)
        pieces, scores = _tokens(tokens.read_bytes(), vocab)
    except (struct.error, ValueError, IndexError) as error:
        raise ConfigError(f"{weights} is no checkpoint of the llama2.c kind: {error}") from error
    info = ModelInfo(name, hashlib.sha256(data).hexdigest(), vocab, int(model.config.max_position_embeddings), "", "")
    engine = paged_engine(model, info)
    if not isinstance(engine, PagedEngine):
        raise ConfigError(f"paged does not serve {name}: {engine}")
    return TinyModel(name, engine, pieces, scores)


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int
    group: int = 0  # values that share a scale; 0: plain floats

    def floats(self, *shape: int) -> Floats:
        count = int(np.prod(shape))
        self.at += 4 * count
        return np.frombuffer(self.data, "<f4", count, self.at - 4 * count).reshape(shape)

    def matrix(self, *shape: int) -> Floats:
        if not self.group:
            return self.floats(*shape)
        count = int(np.prod(shape))
        values = np.frombuffer(self.data, np.int8, count, self.at).astype(np.float32)
        self.at += count
        scales = self.floats(count // self.group)
        return (values.reshape(-1, self.group) * scales[:, None]).reshape(shape)


def _plain(data: bytes) -> LlamaForCausalLM:
    shape = struct.unpack_from("<7i", data)
    dim, hidden, layers, heads, kv_heads, vocab, _ = shape
    kv = dim // heads * kv_heads
    read = _Reader(data, 28)
    parts: dict[str, Floats] = {"embedding": read.floats(vocab, dim), "attention_norm": read.floats(layers, dim)}
    for key, out, into in (("q", dim, dim), ("k", kv, dim), ("v", kv, dim), ("o", dim, dim)):
        parts[key] = read.floats(layers, out, into)
    parts["ffn_norm"] = read.floats(layers, dim)
    for key, out, into in (("gate", hidden, dim), ("down", dim, hidden), ("up", hidden, dim)):
        parts[key] = read.floats(layers, out, into)
    parts["norm"] = read.floats(dim)
    return _model(shape, parts)


def _quantised(data: bytes) -> LlamaForCausalLM:
    shape = struct.unpack_from("<7i", data, 8)
    dim, hidden, layers, heads, kv_heads, vocab, _ = shape
    kv = dim // heads * kv_heads
    read = _Reader(data, _HEADER, struct.unpack_from("<i", data, 37)[0])
    parts = {"attention_norm": read.floats(layers, dim), "ffn_norm": read.floats(layers, dim), "norm": read.floats(dim)}
    parts["embedding"] = read.matrix(vocab, dim)
    for key, out, into in (
        ("q", dim, dim),
        ("k", kv, dim),
        ("v", kv, dim),
        ("o", dim, dim),
        ("gate", hidden, dim),
        ("down", dim, hidden),
        ("up", hidden, dim),
    ):
        parts[key] = np.stack([read.matrix(out, into) for _ in range(layers)])
    return _model(shape, parts)


def _model(shape: Sequence[int], parts: dict[str, Floats]) -> LlamaForCausalLM:
    dim, hidden, layers, heads, kv_heads, vocab, context = shape
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=abs(vocab),
            hidden_size=dim,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )
    state = {"model.embed_tokens.weight": parts["embedding"], "model.norm.weight": parts["norm"]}
    state["lm_head.weight"] = parts["embedding"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        state[prefix + "input_layernorm.weight"] = parts["attention_norm"][layer]
        state[prefix + "post_attention_layernorm.weight"] = parts["ffn_norm"][layer]
        state[prefix + "self_attn.q_proj.weight"] = _halves(parts["q"][layer], heads)
        state[prefix + "self_attn.k_proj.weight"] = _halves(parts["k"][layer], kv_heads)
        for key in ("v", "o"):
            state[f"{prefix}self_attn.{key}_proj.weight"] = parts[key][layer]
        for key in ("gate", "down", "up"):
            state[f"{prefix}mlp.{key}_proj.weight"] = parts[key][layer]
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
    model.train(False)
    model.requires_grad_(False)
    return model


def _halves(weight: Floats, heads: int) -> Floats:
    """Rotary pairs (2i, 2i + 1) of each head become (i, i + half), as transformers rotates them."""
    out, into = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, into).swapaxes(1, 2).reshape(out, into)


def _tokens(data: bytes, vocab: int) -> tuple[dict[bytes, int], tuple[float, ...]]:
    at = 4
    pieces: dict[bytes, int] = {}
    scores: list[float] = []
    for token in range(vocab):
        score, length = struct.unpack_from("<fi", data, at)
        piece = data[at + 8 : at + 8 + length]
        at += 8 + length
        scores.append(float(score))
        if token > EOS:
            pieces.setdefault(piece, token)
    return pieces, tuple(scores)
