"""What engines on torch share: logits to `Dist`, KV tensors to `KvPrefix` and back, the device of a thread; and their
self-test at load time.

The only module that makes distributions from tensors, and the only one that knows how bfloat16 is represented.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.batching.block_manager import KvPrefix
from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.core.sampling.dist import Dist
from paceline.engine.base import Engine, ModelInfo
from paceline.errors import ConfigError, EngineError, EngineLost

_BITS = {torch.bfloat16: torch.uint16}  # formats that numpy lacks are represented by their bits


def computes_bfloat16() -> bool:
    """True if this processor has kernels for linear layers in bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def use_device(device: torch.device) -> None:
    """Make this GPU the thread's own: streams, kernels and pinned memory are made on the current one."""
    if device.type == "cuda" and device.index is not None and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device)


def dists(logits: Tensor) -> tuple[Dist, ...]:
    """Dense distributions at temperature 1, by torch's softmax. logits: (rows, vocab), any float dtype."""
    scores = logits.float()
    norms = torch.logsumexp(scores, dim=-1).tolist()
    probs = torch.softmax(scores, dim=-1).double().cpu().numpy()
    return tuple(Dist.dense(row, norm) for row, norm in zip(probs, norms, strict=True))


def kv_from_tensors(model: str, tokens: Sequence[int], keys: Tensor, values: Tensor) -> KvPrefix:
    """keys: (layers, rows, kv heads, key dim), values likewise; on any device. Must not be changed afterwards."""
    name = str(keys.dtype).removeprefix("torch.")
    arrays = [tensor.view(_BITS.get(tensor.dtype, tensor.dtype)).cpu().numpy() for tensor in (keys, values)]
    return KvPrefix(model, name, tuple(tokens), arrays[0], arrays[1])


def kv_to_tensors(
    rows: KvPrefix, model: str, keys: Sequence[int], values: Sequence[int], *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """CPU tensors that share the memory of `rows`: read-only.

    keys, values: the required shapes. Raises EngineError for other shapes, another dtype or another model.
    """
    name = str(dtype).removeprefix("torch.")
    found, required = (rows.keys.shape, rows.values.shape), (tuple(keys), tuple(values))
    if rows.model != model or rows.dtype != name or found != required:
        raise EngineError(f"these rows are of another model, or {rows.dtype} {found} where {name} {required} is needed")
    first, second = (torch.from_numpy(array).view(dtype) for array in (rows.keys, rows.values))
    return first, second


def engine_error(error: RuntimeError, device: torch.device) -> EngineError:
    """A forward has failed: it ran out of memory, or the device is lost.

    CUDA reports a fault late and then on every call, so the device itself is asked.
    """
    if device.type == "cuda":
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        else:
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as fault:
                return EngineLost(f"the GPU has failed: {fault}")
    return EngineError(f"the model could not run: {error}")


# ---- self-test: an engine's scores of a short prompt against those of the model's plain forward ---------------------
# The plain forward must not depend on later tokens. Covers a split chain, a tree in two parts with two commits, and a
# truncation. Sliding windows are covered only if they are shorter than the prompt.
log = logging.getLogger("paceline.engine")

_MAX_PROMPT = 40  # tokens: more than the windows of test models, less than a second for a large model
# Total variation of a row. In bfloat16 two right forwards of Qwen2.5-Coder-1.5B are 0.18 apart at the first token, each
# 0.1 from float32; a row that sees what it must not is farther off in a trained model.
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6, torch.bfloat16: 0.3, torch.float16: 0.05}

_LOOK_AHEAD = {torch.float32: 1e-4, torch.float64: 1e-6}  # an encoder's, untrained: 5e-4; of a causal model: rounding


def prompt_for(windows: Mapping[str, int | None], info: ModelInfo) -> list[int]:
    """Arbitrary tokens, more than fit in a small sliding window."""
    longest = max((window for window in windows.values() if window is not None), default=8)
    length = min(max(12, longest + 6), _MAX_PROMPT, info.max_positions)
    return [(37 * i * i + 11 * i + 5) % info.vocab_size for i in range(length)]


def plain_scores(model: PreTrainedModel, prompt: Sequence[int], name: str) -> tuple[Dist, ...]:
    """The model's own distribution after each token of the prompt.

    Raises ConfigError for a model that cannot continue a text: one whose forward pass fails, or whose scores change
    with a later token, as those of an encoder do that reads both ways.
    """
    other = [*prompt[:-1], (prompt[-1] + 1) % model.config.get_text_config().vocab_size]
    try:
        with torch.inference_mode():
            ids = torch.tensor([[*prompt], other], device=model.device)
            logits = model(input_ids=ids, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model made for something else may raise any error
        raise ConfigError(
            f"{name} cannot be served, since {type(model).__name__} fails on a short text: {error}"
        ) from error
    change = (logits[0].float() - logits[1].float()).abs().mean(-1)
    if bool(change[:-1].max() > _LOOK_AHEAD.get(model.dtype, 0.02) * change[-1]):
        raise ConfigError(
            f"{name} ({type(model).__name__}) reads a text both ways, as encoders such as BERT do, and cannot continue "
            "one: give a causal language model."
        )
    return dists(logits[0])


def agrees(engine: Engine, prompt: Sequence[int], plain: Sequence[Dist], dtype: torch.dtype) -> bool:
    """True if the engine's distributions are within `TOLERANCE` of `plain`, one for each token of the prompt.

    The sequence used is released.
    """
    seq, cut = SeqId(-1), len(prompt) - 4
    a, b, c, d = prompt[cut:]
    try:
        scored = list(engine.forward(Batch((Segment(seq, 0, tuple(prompt[: cut - 1]), logits="all"),))).dists[0])
        scored += engine.forward(Batch((Segment(seq, cut - 1, (prompt[cut - 1],)),))).dists[0]
        engine.forward(Batch((Segment(seq, cut, (d, c)),)))
        engine.truncate(seq, cut)
        # the path is rows 1, 3 and 4, scored in two parts
        scored += engine.forward(Batch((Segment(seq, cut, (c, a), (-1, -1)),))).dists[0]
        grown = engine.forward(Batch((Segment(seq, cut + 2, (d, b, c), (1, 1, 3), "all", (2, 3, 4)),))).dists[0]
        scored += grown[1:]
        engine.prune(seq, (1, 3), live=(4,))
        engine.prune(seq, (4,))
        scored += engine.forward(Batch((Segment(seq, cut + 3, (d,)),))).dists[0]
        engine.check()
    except Exception as error:
        # An unsupported architecture may raise any error: it cannot be served by this engine.
        log.debug("self-check of %s: %s", engine.info.name, error)
        return False
    finally:
        engine.release(seq)
    worst = max(float(np.abs(x.probs - y.probs).sum()) / 2 for x, y in zip(scored, plain, strict=True))
    log.debug("self-check of %s: total variation %.2g", engine.info.name, worst)
    return worst <= TOLERANCE.get(dtype, 0.3)
