"""The demonstration's models: a reader for both sides, and a pair of small causal models; sample documents for them.

demo_pair  answers of the pair through the real engines and strategies, over a simulated network
training   corpus, training and evaluation of the reader and of the pair
"""

from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent

DEVICE: Final = _HERE / "device"
CLOUD: Final = _HERE / "cloud"
READER: Final = _HERE / "reader"
SAMPLES: Final = _HERE / "samples"
