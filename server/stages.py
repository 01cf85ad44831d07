"""The stages of this server's model: enrolled at it as devices are, with a role of their own, or started by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.engine.base import AsyncEngine
from paceline.engine.loader import EngineOptions, fingerprint
from paceline.engine.model_config import sampling_defaults
from paceline.errors import ConfigError, StorageError
from paceline.runtime.link.connection import Authenticator
from paceline.runtime.stages.links import split_address
from paceline.runtime.stages.members import LocalPlace, Members, Place, Standing
from paceline.runtime.stages.pipeline import RemotePipeline
from paceline.settings import ServerSettings, variable
from paceline.system import usable_cores
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Signer
from paceline.wire.stages.messages import RowFormat

from .devices import Registry

log = logging.getLogger("paceline.stages")

MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class StagesWanted:
    count: int = 0  # stages to start here
    gpus: bool = False  # each on a GPU of its own
    addresses: tuple[str, ...] = ()  # of running ones

    @staticmethod
    def parse(values: Sequence[str]) -> StagesWanted:
        """`3`, `local:2`, or `HOST:PORT` once for each stage. Raises ValueError."""
        if len(values) == 1:
            kind, _, number = values[0].rpartition(":")
            if kind in ("", "local") and number.isdigit():
                if not 1 <= int(number) <= MAX_STAGES:
                    raise ValueError(f"give 1 to {MAX_STAGES} stages")
                return StagesWanted(int(number), gpus=kind == "local")
        for value in values:
            split_address(value)
        if len(set(values)) < len(values):
            raise ValueError("an address is given twice")
        return StagesWanted(addresses=tuple(values))


def open_stages(
    directory: Path,
    wanted: StagesWanted,
    *,
    name: str,
    key: Signer,
    admit: Authenticator,
    options: EngineOptions,
    format: RowFormat | None = None,
    standing: Standing | None = None,
) -> RemotePipeline:
    """key: the head's, which stages pinned when they enrolled. admit: recognises running stages; standing: whether they
    may stay. options: of local ones. Returns once every stage has loaded its layers. Raises ConfigError.
    """
    places: list[Place] = [Place(address) for address in wanted.addresses]
    started = [
        LocalPlace(
            f"local stage {number + 1}",
            key.public_key,
            _arguments(directory, options, wanted, number),
            {variable("tuning.threads"): str(options.threads or max(1, usable_cores() // wanted.count))},
            model=directory,
        )
        for number in range(wanted.count)
    ]
    if wanted.gpus:
        _check_gpus(wanted.count)
    make = partial(
        Members,
        [*places, *started],
        key=key,
        admit=_admit_of({place.name: place for place in started}, admit),
        fingerprint=fingerprint(directory),
        format=format,
        standing=standing,
    )
    pipeline = RemotePipeline(make, name, sampling_defaults(directory))
    for number, member in enumerate(pipeline.members.order, 1):
        about = member.about
        log.info(
            "stage %d of %d: layers %d:%d at %s, %d MiB resident",
            number,
            len(pipeline.members.order),
            about.first,
            about.stop,
            member.place,
            about.resident_bytes >> 20,
        )
    return pipeline


def _admit_of(started: dict[str, LocalPlace], admit: Authenticator) -> Authenticator:
    async def either(claim: Claim) -> bytes | CloseCode:
        place = started.get(claim.device)
        return await admit(claim) if place is None else place.admits(claim)

    return either


def _arguments(directory: Path, options: EngineOptions, wanted: StagesWanted, number: int) -> list[str]:
    device = f"cuda:{number}" if wanted.gpus else options.device
    given = ["--model", str(directory), "--dtype", options.dtype, "--engine-device", device, "--log-level", "warning"]
    if options.kv_mib is not None:
        given += ["--kv-mib", str(max(1, options.kv_mib // wanted.count))]
    return given


def _check_gpus(count: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if count > found:
        raise ConfigError(f"stages = local:{count} needs {count} GPUs; torch sees {found} here. Give --stages {count}.")


def opened_stages(
    settings: ServerSettings, key: Signer, registry: Registry
) -> Callable[[Path, str], AbstractContextManager[AsyncEngine]]:
    """Raises ConfigError for a setting that cannot be used."""
    try:
        wanted = StagesWanted.parse(settings.stages)
    except ValueError as error:
        raise ConfigError(f"stages = {','.join(settings.stages)} cannot be used: {error}.") from None

    async def admit(claim: Claim) -> bytes | CloseCode:
        return await asyncio.to_thread(registry.recognise, claim, "stage")

    async def standing(name: str, stage_key: bytes) -> CloseCode | None:
        try:
            found = await asyncio.to_thread(registry.standings, {name: stage_key})
        except StorageError:
            return None  # looked up again in a second
        return found[name][0]

    tuning = settings.tuning
    options = EngineOptions("paged", settings.dtype, settings.engine_device, tuning.threads, None, settings.kv_mib)
    form = None if tuning.stage_format == "auto" else tuning.stage_format

    def opened(directory: Path, name: str) -> AbstractContextManager[AsyncEngine]:
        return closing(
            open_stages(
                directory, wanted, name=name, key=key, admit=admit, options=options, format=form, standing=standing
            )
        )

    return opened
