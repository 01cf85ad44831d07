"""Engines work on the device that they were loaded on, whatever device is the default or another thread's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from paceline.core.batching.segment import Batch, Segment
from paceline.core.sampling.sampler import RowSampling, SamplingParams
from paceline.engine.base import Engine, SampleRequest
from paceline.engine.tensors import use_device
from tests.engine.trials import sequences

SUBJECTS = ["hf-llama", "paged-llama", "paged-gemma2", "tiled-gemma2"]
PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.1),
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(seed=2, top_k=5, logit_bias={3: 1.0}),
]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_tensor_is_made_on_the_engines_own_device(subject: str, load: Callable[[str], Engine]) -> None:
    """A tensor made on the default device, here one without numbers, could not meet those of the model."""
    engine = load(subject)
    vocab = engine.info.vocab_size
    with sequences(engine, 3) as (one, other, imported), torch.device("meta"):
        engine.forward(Batch((Segment(one, 0, tuple(range(40))), Segment(other, 0, (1, 2, 3)))))
        for _ in range(2):
            tree = Segment(one, engine.length(one), (4, 5, 6), (-1, 0, 0), "all")
            output = engine.forward(Batch((tree, Segment(other, engine.length(other), (7,)))))
            rows = tuple(
                RowSampling(params, position=at, vocab_size=vocab, counts={1: 2}, num_top=at)
                for at, params in enumerate(PARAMS)
            )
            (found,) = engine.sample([SampleRequest(((output.logits[0],),), rows)])
            assert len(found) == 3
            engine.prune(one, (0, 2))
        engine.import_kv(imported, engine.export_kv(one, tuple(range(10))))
        engine.truncate(other, 2)
        engine.forward(Batch((Segment(other, 2, (9,)), Segment(imported, 10, (9,)))))
        engine.check()


def test_the_thread_that_calls_an_engine_makes_its_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, graphs and pinned memory belong to the thread's current device, 0 at first."""
    current = threading.local()
    chosen: list[tuple[str, int]] = []

    def choose(device: torch.device) -> None:
        current.index = device.index
        chosen.append((threading.current_thread().name, device.index))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    for name in ("loader", "engine"):
        thread = threading.Thread(target=lambda: [use_device(torch.device("cuda:1")) for _ in range(3)], name=name)
        thread.start()
        thread.join()
    use_device(torch.device("cuda:0"))
    use_device(torch.device("cuda"))
    use_device(torch.device("cpu"))
    assert chosen == [("loader", 1), ("engine", 1)]
