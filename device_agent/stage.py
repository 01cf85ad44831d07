"""`paceline stage`: layers of a model as a process of their own, for a server that has its model in stages."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import typer

from paceline.errors import ConfigError
from paceline.secret_files import STDIN, given_secret
from paceline.settings import StageSettings
from paceline.settings_sources import Origins, describe_given
from paceline.system import in_own_thread, usable_cores

if TYPE_CHECKING:
    import asyncio

    from paceline.runtime.stages.members import StageCredential

EXAMPLE = "Example: paceline stage --model Qwen/Qwen2.5-7B-Instruct --layers 0:14 --server https://example.org --code -"


def stage(settings: StageSettings, origins: Origins) -> None:
    """Run layers of a model for a server that spreads it over several processes or machines (`serve --stages`)."""
    import asyncio

    from paceline.api.http.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    if settings.credential is None:
        logging.getLogger("paceline.settings").info("%s", describe_given(settings, origins))
    asyncio.run(_run(settings))


async def _run(settings: StageSettings) -> None:
    import asyncio

    from paceline.engine.loader import EngineOptions, find, fingerprint, need_torch
    from paceline.models import CAUSAL, CLOUD

    # Before anything that takes seconds to import: without its model no stage can start.
    directory = await asyncio.to_thread(find, CLOUD if settings.model == CAUSAL else settings.model)
    model_fingerprint = await asyncio.to_thread(fingerprint, directory)

    need_torch("A stage")
    import torch

    from paceline.engine.stage import Stage, load_stage, measure, num_layers
    from paceline.runtime.stages.links import split_address
    from paceline.runtime.stages.members import READY
    from paceline.runtime.stages.stage_server import StageServer, resident_bytes

    options = EngineOptions(
        "paged", settings.dtype, settings.engine_device, settings.tuning.threads, kv_rows=None, kv_mib=settings.kv_mib
    )
    try:
        host, port = split_address(settings.listen)
    except ValueError as error:
        raise ConfigError(f"--listen: {error}.") from None
    known = await _credential(settings)
    torch.set_num_threads(settings.tuning.threads or min(torch.get_num_threads(), usable_cores()))

    def load(first: int, stop: int) -> Stage:
        return in_own_thread(partial(load_stage, directory, first, stop, options))

    stage_server = StageServer(
        load,
        key=known.key,
        name=known.name,
        head_key=known.head_key,
        model=(model_fingerprint, num_layers(directory)),
        cost=None if settings.span is not None else lambda: measure(directory, options),
    )
    if settings.span is not None:
        loaded = stage_server.worker.load(*settings.span)
        typer.echo(
            f"paceline stage: layers {loaded.first}:{loaded.stop} of {loaded.whole_layers} of {directory.name}, "
            f"{resident_bytes() >> 20} MiB resident"
        )
    try:
        listening = await stage_server.listen(host, port)
    except OSError as error:
        raise ConfigError(f"--listen {settings.listen}: {error.strerror}.") from None
    bound = listening.sockets[0].getsockname()
    where = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
    typer.echo(f"{READY}{where}:{bound[1]}")
    sys.stdout.flush()
    try:
        if settings.credential == STDIN:
            await _until_input_ends(stage_server.failed)
        else:
            await stage_server.failed
    finally:
        listening.close()
        stage_server.close()


async def _credential(settings: StageSettings) -> StageCredential:
    """The identity of this stage, from the head that started it or from its enrolment. Raises ConfigError."""
    import msgspec

    from paceline.runtime.stages.members import StageCredential

    from .cloud import Credentials, exchange, http_url

    if settings.credential == STDIN:
        try:
            return msgspec.json.decode(sys.stdin.readline(), type=StageCredential)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--credential cannot be used: {error}.") from None
    if settings.server is None:
        raise ConfigError("A stage belongs to a server: give --server URL, and --code - the first time.")
    url = http_url(settings.server)
    kept = Credentials(settings.state_dir / "stage")
    code = given_secret("code", settings.code, settings.code_file)
    if code is not None:
        kept.put(url, await exchange(url, code))
    found = kept.get(url)
    if found is None:
        raise ConfigError(
            f"This stage is not enrolled at {settings.server}. Run `paceline devices add NAME --role stage` at the "
            "server and start the stage once with `--code -`."
        )
    return StageCredential(found.device, found.keys[0].seed, found.server_key)


async def _until_input_ends(failed: asyncio.Future[None]) -> None:
    """The head that started this process holds the other end of its input."""
    import asyncio

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096) and not ended.done():
            ended.set_result(None)

    loop.add_reader(sys.stdin.fileno(), read)
    try:
        await asyncio.wait((ended, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        loop.remove_reader(sys.stdin.fileno())
