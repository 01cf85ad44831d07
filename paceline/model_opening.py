"""The models that settings name, opened: the first at the start, the others when a request names them.

Knows nothing of stores, links or keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from paceline.core.sampling.sampler import SamplingDefaults
from paceline.engine.base import AsyncEngine, LoadedModel, ModelInfo, ServedModel, TextModel, delay_forwards
from paceline.engine.loader import choose_device, describe_model, find, load_model
from paceline.engine.loader import served_name as name_of
from paceline.engine.remote.opening import open_remote
from paceline.engine.remote.servers import RemoteModel
from paceline.errors import ConfigError
from paceline.runtime.engine_loop.executor import STEP_ROWS
from paceline.runtime.link.emulation import Emulation
from paceline.runtime.node import Node
from paceline.runtime.served_models import ModelMemory, ModelSlot
from paceline.runtime.units import HostUnit, NodeUnits
from paceline.settings import NodeSettings, ServerSettings
from paceline.system import usable_memory

GPU_STEP_ROWS = 2048

Shipped = Mapping[str, Path]
"""Folders of the demonstration's models by their names."""


def open_model(settings: NodeSettings, shipped: Shipped, wanted: str | None = None) -> LoadedModel:
    """Load a model of the settings, the first if none is wanted.

    Its engine is delayed where the settings emulate a slower machine. Raises ConfigError with what to do.
    """
    emulation = Emulation.parse(settings.tuning.emulate or "")
    wanted = wanted or settings.first_model
    demo = _shipped(wanted, shipped)
    model = load_model(
        demo or wanted,
        backend=settings.tuning.backend,
        dtype=settings.dtype,
        device=settings.engine_device,
        threads=settings.tuning.threads or len(workflow_units(settings).engine_cores) or None,
        kv_mib=settings.kv_mib,
        quantize=settings.quantize,
        name=wanted if demo else None,
    )
    if not (emulation.forward or emulation.row):
        return model
    return replace(model, engine=delay_forwards(model.engine, emulation.forward, emulation.row))


@contextmanager
def opened_model(
    settings: NodeSettings,
    shipped: Shipped,
    open_engine: Callable[[Path, str], AbstractContextManager[AsyncEngine]] | None = None,
) -> Iterator[ServedModel]:
    """The first of `open_model`, or its tokenizer with the engine that `open_engine` opens and closes."""
    if isinstance(settings, ServerSettings) and settings.engine_url:
        yield ServedModel(*open_far_model(settings))
        return
    if open_engine is None:
        yield open_model(settings, shipped)
        return
    from paceline.engine.tokenizer import Tokenizer

    demo = shipped.get(settings.first_model)
    directory = find(demo or settings.first_model)
    tokenizer = Tokenizer.load(directory)  # before processes are started for its weights
    with open_engine(directory, settings.first_model if demo else name_of(settings.first_model)) as engine:
        yield ServedModel(engine, tokenizer)


def open_far_model(settings: ServerSettings) -> tuple[RemoteModel, TextModel]:
    """The model of the servers that the settings name, and its tokenizer. Raises ConfigError."""
    if settings.first_model.startswith("fake"):
        raise ConfigError("The fake model runs here: leave --engine-url out, or give the name of the servers' model.")
    from paceline.engine.tokenizer import Tokenizer

    directory = find(settings.first_model, weights=False)
    text, name = Tokenizer.load(directory), settings.name or name_of(settings.first_model)
    return open_remote(settings.engine_url, directory, text, name=name, key=settings.engine_key), text


def served_name(settings: NodeSettings, model: ServedModel) -> str:
    return settings.name or model.engine.info.name


def sampling_of(settings: NodeSettings) -> SamplingDefaults:
    names = (each.name for each in fields(SamplingDefaults))
    return SamplingDefaults(**{name: getattr(settings.answers, name) for name in names})


def device_of(settings: NodeSettings, info: ModelInfo) -> str:
    return "cpu" if info.is_on_host else choose_device(settings.engine_device)


def step_rows(settings: NodeSettings, info: ModelInfo) -> int:
    """Rows of one step of the engine, at most. A GPU computes hundreds in the time of one, so its steps are larger."""
    on_gpu = device_of(settings, info) != "cpu"
    return settings.tuning.step_rows or (GPU_STEP_ROWS if on_gpu else STEP_ROWS)


def workflow_units(settings: NodeSettings) -> NodeUnits:
    """Processing units of workflows, as declared; those of a kind that is not declared are found."""
    found = NodeUnits()
    hosts = []
    for name, unit in settings.tuning.units.items():
        if unit.kind == "engine":
            found = replace(found, engine=name, lanes=unit.lanes or found.lanes, engine_cores=frozenset(unit.cores))
        else:
            hosts.append(HostUnit(name, frozenset(unit.cores), frozenset(unit.does)))
    return replace(found, hosts=tuple(hosts) or found.hosts)


def further_models(
    settings: NodeSettings, shipped: Shipped, first: ServedModel, open_node: Callable[[LoadedModel, str], Node]
) -> ModelMemory:
    """The models but the first, none of which is loaded yet.

    open_node: of a model and its served name. Models of the hub are fetched now, so that a wrong name is found at the
    start. Raises ConfigError.
    """
    device = "cpu" if len(settings.model) == 1 else choose_device(settings.engine_device)
    if device != "cpu" and settings.kv_mib is None:
        raise ConfigError(
            "Several models share this GPU's memory: say with kv_mib how much of it each one's cache takes."
        )
    memory = ModelMemory(
        idle_s=60 * settings.tuning.model_idle_minutes, free=lambda: memory_of(device)[0], total=memory_of(device)[1]
    )
    names = {served_name(settings, first)}

    async def load(wanted: str, slot: ModelSlot) -> Node:
        async with memory.room_for(slot):
            model = await asyncio.to_thread(open_model, settings, shipped, wanted)
        return open_node(model, slot.info.name)

    for wanted in settings.model[1:]:
        demo = _shipped(wanted, shipped)
        found = describe_model(
            demo or wanted,
            name=wanted if demo else name_of(wanted),
            backend=settings.tuning.backend,
            device=settings.engine_device,
            quantize=settings.quantize,
        )
        info = found.info
        if info.name in names:
            raise ConfigError(f"Two models would be called {info.name}: rename a folder, or give the first a --name.")
        names.add(info.name)
        info = replace(info, sampling=sampling_of(settings).over(info.sampling), system=settings.answers.system or "")
        is_joint = found.tokenizer == first.tokenizer.fingerprint
        memory.slots.append(ModelSlot(info, partial(load, wanted), is_joint=is_joint, weights=found.weights))
    return memory


def _shipped(wanted: str, shipped: Shipped) -> Path | None:
    """Folder of a model of the demonstration; None for another. Raises ConfigError."""
    demo = shipped.get(wanted)
    if demo is not None and not demo.is_dir():
        raise ConfigError(f"The demonstration model is not in {demo}: install paceline again, or give --model.")
    return demo


def memory_of(device: str) -> tuple[int, int]:
    """Free bytes now, and all."""
    if device == "cpu":
        return usable_memory()
    import torch

    return torch.cuda.mem_get_info(device)
