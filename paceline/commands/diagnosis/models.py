"""The models of the settings as `paceline doctor` sees them: files, chat template, and memory beside what is there.

No weight is read. Not handled: kernels and operations that a model needs, which only loading it tells.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from paceline.commands.diagnosis.outcome import Found
from paceline.errors import ConfigError
from paceline.settings import NodeSettings

if TYPE_CHECKING:
    import torch

GIB: Final = 1 << 30
INDEX: Final = "model.safetensors.index.json"


def model(settings: NodeSettings, wanted: str) -> Found:
    """Check that this model of the settings can be loaded. Raises ConfigError, with what to do, where it cannot."""
    if wanted.startswith("fake"):
        return "ok", f"{wanted}: made up, for tests"
    directory = local_folder(settings, wanted)
    if directory is None:
        return _at_hub(wanted)
    return _look(settings, wanted, directory)


def local_folder(settings: NodeSettings, wanted: str) -> Path | None:
    """Where a model lies on this machine; None for one that would have to be fetched. Raises ConfigError for what is no
    model."""
    from paceline.hub.download import local
    from paceline.hub.folders import find
    from paceline.hub.names import HubName
    from paceline.models import shipped

    if (bundled := shipped(settings.side).get(wanted)) is not None:
        return find(bundled)
    if not Path(wanted).expanduser().is_dir():
        name = HubName.parse(wanted)
        try:
            local(name)
        except ConfigError:
            return None
    return find(wanted, download=False)


def _at_hub(wanted: str) -> Found:
    from paceline.hub.download import Unreachable, remote_size
    from paceline.hub.names import HubName

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
    from paceline.hub.facts import facts_of
    from paceline.runtime.served_models import OVERHEAD

    described, facts = describe_model(directory, name=wanted), facts_of(directory)
    if facts.kind not in ("chat", "reader"):
        raise ConfigError(f"{wanted} is a {facts.architecture or 'model'}, which writes no text: choose another model.")
    sizes = _tensors(directory)
    device = choose_device(settings.engine_device)
    dtype, size = ("float32", 4) if facts.kind == "reader" else _loaded_as(settings, device, sizes, directory)
    needed = int(OVERHEAD * size * sum(sizes.values()))
    free, total = _memory("cpu" if facts.kind == "reader" else device)
    text = (
        f"{wanted}: {sum(sizes.values()) / 1e6:.0f} million weights as {dtype}, {described.info.max_positions} tokens "
        f"of context, about {needed / GIB:.1f} GiB to load, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    )
    if needed > total:
        return "fail", f"{text}: choose a smaller model, or spread it with stages"
    if needed > free:
        return "warn", f"{text}: end other programs, or choose a smaller model"
    if facts.kind == "chat" and not facts.has_template:
        return "warn", f"{text}; without a chat template, so written to in ChatML: an instruct model answers better"
    return "ok", text


def _tensors(directory: Path) -> dict[str, int]:
    """Weights of each number format, as safetensors calls it, by the headers of all files. Raises ConfigError for files
    that are missing, cut or damaged."""
    from safetensors import SafetensorError, safe_open

    _check_parts(directory)
    found: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
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
    """Number format in which the weights will be kept, and bytes of one."""
    import torch

    from paceline.engine.loader import choose_dtype

    formats: dict[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    most = max(sizes, key=lambda name: sizes[name])
    dtype = choose_dtype(settings.dtype, torch.device(device), formats.get(most), directory)
    return str(dtype).removeprefix("torch."), dtype.itemsize


def _memory(device: str) -> tuple[int, int]:
    """Free bytes now, and all, of the memory that a model is loaded into."""
    if device == "cpu":
        return psutil.virtual_memory().available, psutil.virtual_memory().total
    import torch

    return torch.cuda.mem_get_info(device)
