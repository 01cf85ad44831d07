"""The demonstration's models: a reader for both sides, and a pair of small causal models; sample documents for them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from paceline.core.side import Side

_HERE: Final = Path(__file__).parent

DEVICE: Final = _HERE / "device"
CLOUD: Final = _HERE / "cloud"
READER: Final = _HERE / "reader"
SAMPLES: Final = _HERE / "samples"

DEMO: Final = "demo"  # names for `--model`
CAUSAL: Final = "demo-causal"


def shipped(side: Side) -> Mapping[str, Path]:
    """Folders of the models that a side can be given by name: the reader, which is the same on both, and the causal one
    of the side."""
    return {DEMO: READER, CAUSAL: CLOUD if side == "cloud" else DEVICE}
