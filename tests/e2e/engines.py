"""Servers in this process whose models run elsewhere than in the fake engine: behind servers, and on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.api.app import create_app
from paceline.api.http.auth import Keyring
from paceline.engine.base import ServedModel
from paceline.engine.fake import ByteTokenizer
from paceline.engine.loader import load_model
from paceline.engine.remote.opening import open_remote
from paceline.rag.embedder import HashEmbedder
from paceline.rag.store.documents import DocumentStore
from paceline.runtime.node import Node
from tests.api.scripted import running
from tests.runtime.remote.standin import StandIn, installed

WIDTH, LAYERS, CONTEXT = 64, 2, 4096
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def behind_servers(directory: Path) -> Iterator[ServedModel]:  # noqa: ARG001  # of the others' kind
    words = ByteTokenizer()
    with installed(StandIn(), "one") as urls:
        yield ServedModel(open_remote(urls, Path(), words, name="fake"), words)


@contextmanager
def on_llama_cpp(directory: Path) -> Iterator[ServedModel]:
    write_bytes_model(directory / "fake.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield load_model(directory / "fake.gguf", backend="llama_cpp", kv_rows=4 * CONTEXT, threads=1, name="fake")


ENGINES: dict[str, Callable[[Path], AbstractContextManager[ServedModel]]] = {
    "http": behind_servers,
    "llama_cpp": on_llama_cpp,
}


def write_bytes_model(file: Path) -> None:
    """A llama of random weights whose tokens are bytes, and which prefers those of ASCII that can be printed."""
    random, shown = np.random.default_rng(5), [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))  # how GPT-2's vocabularies write the other bytes
    tokens = [chr(byte if byte in shown else next(others)) for byte in range(256)]
    tokens += ["<|im_start|>", "<|im_end|>", "th"]
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_head_count(4)
    writer.add_context_length(CONTEXT)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template(TEMPLATE)

    def drawn(*shape: int, scale: float = 0.2) -> NDArray[np.float32]:
        return (scale * random.normal(size=shape)).astype(np.float32)

    embedding, output = drawn(len(tokens), WIDTH, scale=1.0), drawn(len(tokens), WIDTH, scale=0.4)
    embedding[:, 0], output[:, 0] = 8.0, -8.0  # of all rows: no layer writes there
    output[32:127, 0] = 2.0
    tensors = {"token_embd": embedding, "output": output, "output_norm": np.ones(WIDTH, np.float32)}
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}_norm": np.ones(WIDTH, np.float32) for name in ("attn", "ffn")}
        parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        tensors |= {f"blk.{layer}.{name}": drawn(WIDTH, WIDTH) for name in parts}
        tensors[f"blk.{layer}.attn_output"][0] = tensors[f"blk.{layer}.ffn_down"][0] = 0.0
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def serving(engine: str, directory: Path) -> Iterator[str]:
    """The URL of a cloud of its own, with one of `ENGINES`, where files and responses are kept in a folder."""
    with ENGINES[engine](directory) as model, DocumentStore.open(directory / "docs", HashEmbedder()) as store:
        node = Node("cloud", model, store)
        with running(create_app(node, keyring=Keyring({}), state=directory), node) as url:
            yield url
