"""The demo pair: two small models that read documents, and the sample documents they are shown with."""

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent

DEVICE: Final = _HERE / "device"
CLOUD: Final = _HERE / "cloud"
SAMPLES: Final = _HERE / "samples"
