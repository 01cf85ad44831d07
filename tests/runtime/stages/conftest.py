"""The demonstration's model as a whole, for comparison with its stages."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.base import Engine
from paceline.engine.loader import EngineOptions, load_engine
from tests.runtime.stages.rig import DEMO


@pytest.fixture(scope="module")
def whole() -> Engine:
    torch.set_num_threads(1)
    return load_engine(DEMO, EngineOptions("paged", "float32", kv_rows=2048), name="whole")
