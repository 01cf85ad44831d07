"""The number format in which a model is computed, the one in which its weights are kept, and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from paceline.engine.quantized import dequantize, quantization_of, rows_of
from paceline.engine.stored_weights import STORED, keep_stored
from paceline.engine.tensors import computes_bfloat16

DType = Literal["auto", "float32", "bfloat16", "float16"]
_SMALL_MODEL: Final = 100_000_000  # parameters


@dataclass(frozen=True, slots=True)
class NumberFormat:
    computed: torch.dtype
    is_stored: bool  # every tensor is read in the file's format, not in `computed`
    by_rows: bool  # weights stay so, and rows of them are converted when they are used
    text: str  # for the log

    def adopt(self, model: PreTrainedModel) -> None:
        """Make a model on the CPU, just read, compute in this format."""
        if self.by_rows:
            keep_stored(model, rows_of)
        elif self.is_stored:
            dequantize(model, self.computed)


def choose_format(requested: DType, device: torch.device, config: PretrainedConfig, directory: Path) -> NumberFormat:
    """requested, auto: see `loader.load_model`. Raises ConfigError for a quantisation that is not known here."""
    quantization = quantization_of(config, directory)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    on_cpu = device.type == "cpu"
    if requested != "auto":
        computed, why = getattr(torch, requested), "as asked"
    else:
        computed, why = served_dtype(device, None if quantization else stored, size)
    if quantization and on_cpu:
        computed, why = torch.float32, "in which processors compute quantised weights"
    is_kept_half = stored in STORED and computed == torch.float32 and not _is_small(stored, size)
    by_rows = on_cpu and (quantization is not None or is_kept_half)
    file = quantization or _name(stored or torch.float32)
    if by_rows:
        kept = f"weights stay in {file} as in the file, and rows are converted when they are used"
    else:
        kept = f"weights of the file, in {file}, are kept in {_name(computed)}"
    return NumberFormat(computed, bool(quantization) or by_rows, by_rows, f"{_name(computed)}, {why}; {kept}")


def format_of(requested: DType, device: torch.device, directory: Path) -> NumberFormat:
    """The same of a model that is not loaded yet."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return choose_format(requested, device, config, directory)


def served_dtype(device: torch.device, stored: torch.dtype | None, size: int) -> tuple[torch.dtype, str]:
    """The number format in which a model is computed whose weights are `size` bytes in the format `stored`, and why."""
    if device.type == "cuda":
        return torch.bfloat16, "as on every GPU"
    if stored not in STORED:
        return torch.float32, "as on every processor"
    if _is_small(stored, size):
        return torch.float32, "since a small model is as fast in it"
    if stored == torch.float16:
        return torch.float32, "since processors do not compute in float16"
    if computes_bfloat16():
        return torch.bfloat16, "as in the file"
    return torch.float32, "since this processor does not compute in bfloat16"


def _is_small(stored: torch.dtype | None, size: int) -> bool:
    return size < _SMALL_MODEL * (2 if stored in STORED else 4)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
