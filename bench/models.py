"""Real models for benches: `--models smollm|qwen|MODEL[,MODEL]`, and `scripts/real_models`, which gets or keeps them.

`smollm` is SmolLM2-135M-Instruct on both sides, out of a Python package. `qwen` is Qwen2.5-Coder-0.5B-Instruct on the
device and the 1.5B in the cloud, which have one vocabulary; they come from the hub, or from a folder or GGUF file that
is given to `scripts/real_models` under the model's name and is then found by it. What figures were measured with is
told by its sha256.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from paceline.core.side import Side
from paceline.engine.base import LoadedModel
from paceline.engine.loader import load_model
from paceline.errors import ConfigError, PacelineError
from paceline.hub.cache import find, find_stored, served_name
from paceline.hub.gguf import SUFFIX

SMOLLM: Final = "smollm"
SMALL, LARGE = "Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct"
PAIRS: Final = {SMOLLM: (SMOLLM, SMOLLM), "qwen": (SMALL, LARGE)}  # device, cloud
KEPT: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "models"
MEASURED: Final = {  # sha256 of GGUF files
    SMOLLM: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",  # Q4_1
    SMALL: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",  # Q4_K_M
    LARGE: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",  # Q4_K_M
}


@dataclass(frozen=True, slots=True)
class RealModels:
    """Each as `--model` takes it."""

    device: str
    cloud: str

    @classmethod
    def parse(cls, text: str) -> RealModels:
        """Raises ConfigError for more than two."""
        names = PAIRS.get(text) or text.split(",")
        if len(names) > 2 or not all(names):
            raise ConfigError(f"--models takes {', '.join(PAIRS)}, a model, or two with a comma between, not {text}")
        return cls(kept(names[0]), kept(names[-1]))

    def load(self, side: Side, *, kv_rows: int | None = None) -> LoadedModel:
        """In bfloat16 where this machine computes in it, whatever the file's number format; on one thread."""
        import torch

        dtype: Literal["bfloat16", "float32"] = "float32"
        if torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            dtype = "bfloat16"
        name = self.device if side == "device" else self.cloud
        return load_model(name, dtype=dtype, threads=1, kv_rows=kv_rows)

    @property
    def label(self) -> str:
        """For conditions and rows."""
        names = [served_name(each) for each in dict.fromkeys((self.device, self.cloud))]
        return names[0] if len(names) == 1 else f"{names[0]} on the device, {names[1]} in the cloud"


def kept(name: str) -> str:
    """Where `scripts/real_models` keeps the model of this name; the name itself where it keeps none."""
    folder = KEPT / name.rpartition("/")[2]
    return next((str(path) for path in (folder, Path(f"{folder}{SUFFIX}")) if path.exists()), name)


def keep(name: str, path: Path) -> str:
    """A link to a folder or GGUF file; says whether that is what figures were measured with. Raises ConfigError."""
    is_file = path.suffix == SUFFIX and path.is_file()
    if not (is_file or (path / "config.json").is_file()):
        raise ConfigError(f"{path} is neither a {SUFFIX} file nor a folder with a model.")
    if name not in MEASURED:
        raise ConfigError(f"{name} is no model of the benches: {', '.join(MEASURED)}. Name the path after --models.")
    link = KEPT / (name.rpartition("/")[2] + (SUFFIX if is_file else ""))
    KEPT.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(path.resolve())
    return _checked(name, path)


def _checked(name: str, path: Path) -> str:
    if not path.is_file():
        return "a folder, of which no sum is known"
    with path.open("rb") as stream:
        same = hashlib.file_digest(stream, "sha256").hexdigest() == MEASURED[name]
    return "the file of the figures" if same else "another file than that of the figures"


def main(arguments: Iterable[str]) -> int:
    """Take each NAME=PATH; check SmolLM2's file and write the folder that the engine reads, once."""
    try:
        for argument in arguments:
            name, _, path = argument.partition("=")
            sys.stdout.write(f"{name}: {keep(name, Path(path))}\n")
        file = find_stored(SMOLLM)
        assert file is not None, "it is installed, or that has raised"
        if _checked(SMOLLM, file) != "the file of the figures":
            raise ConfigError(f"{file} is not the file that is known: its sha256 is another.")
        sys.stdout.write(f"{SMOLLM}: {find(SMOLLM)}\n")
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
