"""R28: a model's files are data: pickles are refused unread, and a header that lies is a sentence.

That the package holds no `pickle`, `torch.load`, `eval`, `yaml.load` and no `trust_remote_code=True` is a house rule
(`tests/packaging/test_house.py`).
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.loader import load_model
from paceline.errors import PacelineError
from paceline.models import DEVICE
from tests.reliability.conftest import Figure

PICKLES = ("pytorch_model.bin", "model.pt", "model.pth", "weights.pkl", "consolidated.00.pth", "model.ckpt")
Header = dict[str, Any]


class Armed:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.write_text, (self.mark, "it ran")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEVICE, tmp_path / "model"))


def weights(model: Path) -> Path:
    (file,) = model.glob("*.safetensors")
    return file


def test_a_pickle_is_refused_unread(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in PICKLES:
        (model / name).write_bytes(pickle.dumps(Armed(mark)))
    load_model(model)  # beside safetensors it is not looked at
    weights(model).unlink()
    with pytest.raises(PacelineError, match=r"has no \*\.safetensors weights"):
        load_model(model)
    assert not mark.exists()


def test_code_beside_a_model_is_not_run(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (model / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    config = json.loads((model / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"}}
    (model / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))
    with pytest.raises(PacelineError):
        load_model(model)
    (model / "config.json").write_text(json.dumps(config))
    load_model(model)
    assert not mark.exists()


Lie = Callable[[int, int], Header]  # where the last tensor begins and ends -> what is said of it instead
LIES: dict[str, Lie] = {
    "overlapping": lambda begin, end: {"data_offsets": [0, end - begin]},
    "past the end": lambda begin, end: {"data_offsets": [begin, end + (1 << 40)]},
    "negative": lambda *_: {"data_offsets": [-4, 4]},
    "larger than its bytes": lambda *_: {"shape": [1 << 40, 1 << 40]},
    "of no type": lambda *_: {"dtype": "OBJECT"},
}
LENGTHS = (0, 1, 1 << 20, 100_000_001, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_header_that_lies_is_a_sentence(model: Path, lie: Lie) -> None:
    data = weights(model).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    last = max((header[name] for name in header.keys() - {"__metadata__"}), key=lambda each: each["data_offsets"][1])
    last |= lie(*last["data_offsets"])
    packed = json.dumps(header).encode()
    weights(model).write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])
    with pytest.raises(PacelineError) as caught:
        load_model(model)
    assert "\n" not in str(caught.value)


def test_a_header_of_another_length_is_a_sentence(model: Path, figure: Figure) -> None:
    data = weights(model).read_bytes()
    refused = 0
    for length in LENGTHS:
        weights(model).write_bytes(struct.pack("<Q", length) + data[8:])
        with pytest.raises(PacelineError) as caught:
            load_model(model)
        assert "\n" not in str(caught.value)
        refused += 1
    figure("files refused that lie about their header's length", refused, at_least=len(LENGTHS))
