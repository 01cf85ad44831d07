"""Opens the pipeline that the setting `stages` names: stages of this machine, or running ones elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.engine.generation_config import sampling_defaults
from paceline.engine.loader import EngineOptions, fingerprint
from paceline.errors import ConfigError
from paceline.runtime.stages.connecting import Admit, split_address
from paceline.runtime.stages.local import LocalPlace
from paceline.runtime.stages.members import FixedPlace, Members, Place, Standing
from paceline.runtime.stages.pipeline import RemotePipeline
from paceline.settings import variable
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim, Signer
from paceline.wire.stages.messages import RowFormat

log = logging.getLogger("paceline.stages")

MAX_STAGES = 64


@dataclass(frozen=True, slots=True)
class StagesWanted:
    """The value of the setting."""

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
    admit: Admit,
    options: EngineOptions,
    format: RowFormat | None = None,
    standing: Standing | None = None,
) -> RemotePipeline:
    """key: the head's, which stages pinned when they enrolled. admit: recognises running stages; standing: whether they
    may stay. options: of local ones. Returns once every stage has loaded its layers. Raises ConfigError.
    """
    places: list[Place] = [FixedPlace(address) for address in wanted.addresses]
    started = [
        LocalPlace(
            f"local stage {number + 1}",
            key.public_key,
            _arguments(directory, options, wanted, number),
            {} if options.threads is None else {variable("tuning.threads"): str(options.threads)},
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
        assert about is not None
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


def _admit_of(started: dict[str, LocalPlace], admit: Admit) -> Callable[[Claim], Awaitable[bytes | CloseCode]]:
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
