"""The bench's model in llama.cpp's file format, in the same number format. Needs the package `gguf`.

Only what this bench's own model has: Qwen2 without rope scaling, tied embeddings, a byte-level vocabulary.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from .model_files import WEIGHTS, ModelFiles
from .vocabulary import SPECIAL, TEMPLATE

_NORMAL, _CONTROL = 1, 3  # token types of the format
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: ModelFiles, file: Path) -> Path:
    """Write the file unless it is there already."""
    if file.exists():
        return file
    gguf: Any = importlib.import_module("gguf")  # not a dependency: imported only where it is installed
    writer = gguf.GGUFWriter(str(file), "qwen2")
    _describe(writer, model)
    for name, tensor in load_file(model.directory / WEIGHTS).items():
        if tensor.dim() > 1 and tensor.dtype == torch.bfloat16:
            raw = tensor.contiguous().view(torch.uint8).numpy()  # (rows, 2 * columns) bytes
            writer.add_tensor(_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:  # llama.cpp wants norms and biases in float32
            writer.add_tensor(_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _describe(writer: Any, model: ModelFiles) -> None:
    shape, tokens = model.shape, model.vocabulary.tokens
    config = json.loads((model.directory / "config.json").read_text())
    writer.add_name("bench")
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([_CONTROL if token in SPECIAL else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model.vocabulary.merges])
    # The format has no model without an end token. Those with the logit 0 are never sampled.
    writer.add_eos_token_id(len(tokens) - len(SPECIAL))
    writer.add_bos_token_id(len(tokens) - len(SPECIAL))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    layer = _LAYER.fullmatch(name)
    assert layer is not None, name
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{layer[3]}"
