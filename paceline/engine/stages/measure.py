"""Cost of a layer on this machine, for the plan of spans: measured on one layer, its bytes read from the files."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from safetensors import safe_open
from transformers import AutoConfig

from paceline.core.batching.segment import Batch, Segment, SeqId
from paceline.engine.loader import DEFAULTS, EngineOptions, choose_device, choose_dtype, find
from paceline.engine.stages.stage import EMBEDDING, HEAD, LAYER, Stage, load_stage

SAMPLES = 7  # forwards of one row; the median counts
KV_ROWS = 256  # of the stages that are measured
FREE_SHARE = 0.8  # of the free memory: the rest is for the KV cache and everything else


@dataclass(frozen=True, slots=True)
class LayerCost:
    layer_s: float
    head_s: float
    layer_bytes: int
    embedding_bytes: int
    head_bytes: int
    free_bytes: int


def num_layers(path_or_name: str | Path) -> int:
    config = AutoConfig.from_pretrained(find(path_or_name), local_files_only=True, trust_remote_code=False)
    return int(config.num_hidden_layers)


def measure(path_or_name: str | Path, options: EngineOptions = DEFAULTS) -> LayerCost:
    """Loads the first layer, then the last with the head, one after the other. Takes seconds; raises ConfigError."""
    directory = find(path_or_name)
    layers = num_layers(directory)
    few = options._replace(kv_rows=KV_ROWS, kv_mib=None)
    layer_s = _row_s(load_stage(directory, 0, 1, few)) if layers > 1 else 0.0
    last_s = _row_s(load_stage(directory, layers - 1, layers, few))
    sizes = _sizes(directory, options, layers)
    return LayerCost(layer_s or last_s, max(0.0, last_s - layer_s), *sizes, _free_bytes(options))


def _row_s(stage: Stage) -> float:
    seq, seconds = SeqId(0), list[float]()
    for row in range(SAMPLES + 1):
        batch = Batch((Segment(seq, row, (0,)),))
        hidden = None if stage.first == 0 else np.zeros((1, stage.width), dtype=np.float32)
        began = time.perf_counter()
        stage.forward(batch, hidden)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one prepares


def _sizes(directory: Path, options: EngineOptions, layers: int) -> tuple[int, int, int]:
    """Bytes of a layer, of the embedding and of the head, in the number format they are loaded in."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    dtype = choose_dtype(options.dtype, torch.device(choose_device(options.device)), config.dtype, directory)
    numbers = {"layers": 0, "embedding": 0, "head": 0}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # no dictionary
                count = math.prod(stored.get_slice(name).get_shape())
                if LAYER.fullmatch(name):
                    numbers["layers"] += count
                elif EMBEDDING.search(name):
                    numbers["embedding"] += count
                elif HEAD.match(name):
                    numbers["head"] += count
    head = numbers["head"] or numbers["embedding"]  # tied
    return tuple(count * dtype.itemsize for count in (numbers["layers"] // layers, numbers["embedding"], head))  # type: ignore[return-value]  # three


def _free_bytes(options: EngineOptions) -> int:
    device = torch.device(choose_device(options.device))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(FREE_SHARE * free)
