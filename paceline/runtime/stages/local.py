"""Stages that their head starts itself, as processes of this machine.

Each has a key of its own, made for one process and passed to it over its standard input; a stage ends when that is
closed, so none outlives its head.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from paceline.errors import LinkClosed
from paceline.runtime.identity import PrivateKey
from paceline.runtime.stages.members import Place
from paceline.settings import PREFIX
from paceline.wire.close_codes import CloseCode
from paceline.wire.effects import Claim
from paceline.wire.messages import KEY_BYTES

log = logging.getLogger("paceline.stages")

READY = "paceline stage: listening on "  # how a stage's line about its address begins
CREDENTIAL = ("--credential", "-")
START_S = 120.0
PAUSES_S = (0.0, 1.0, 3.0, 10.0, 30.0)  # before a start, by how many have failed one after the other
STOP_S = 10.0  # a process with torch takes seconds to end


class StageCredential(msgspec.Struct, frozen=True):
    """What a stage needs to be let in: its name, its key's seed, and the key of its head. In JSON, bytes as base64."""

    name: str
    seed: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    head_key: bytes

    @property
    def key(self) -> PrivateKey:
        return PrivateKey(self.seed)

    def __repr__(self) -> str:
        return f"StageCredential({self.name!r})"


class LocalPlace(Place):
    """A stage of this machine. Its process is started when its address is asked for and it does not run."""

    is_started_here = True

    def __init__(
        self,
        name: str,
        head_key: bytes,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        model: Path | None = None,
    ) -> None:
        """arguments: of `paceline stage`. environment: besides this process's. model: the folder that it will read;
        where that is gone, no process is started to find out."""
        super().__init__(name)
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self._head_key = head_key
        self._arguments = tuple(arguments)
        self._environment = dict(environment or {})
        self._key = PrivateKey.generate()
        self._reading: asyncio.Task[None] | None = None
        self._model = model

    def admits(self, claim: Claim) -> bytes | CloseCode:
        return self._key.public_key if claim.proves(self._key.public_key) else CloseCode.BAD_CREDENTIAL

    async def address(self) -> str:
        if self.process is None or self.process.returncode is not None:
            await asyncio.sleep(PAUSES_S[min(self.failed, len(PAUSES_S) - 1)])
            try:
                await self._start()
            except LinkClosed:
                self.failed += 1
                raise
            self.failed = 0
        return self._where

    async def _start(self) -> None:
        if self._model is not None and not (self._model / "config.json").is_file():
            raise LinkClosed(f"{self.name} could not be started: there is no model in {self._model} any more")
        self._key = PrivateKey.generate()
        # What is set for stages elsewhere, or for the head, is not for this one.
        command = (sys.executable, "-m", "paceline", "stage", *self._arguments, "--config", os.devnull, *CREDENTIAL)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        process = self.process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | self._environment,
            start_new_session=True,  # Ctrl-C reaches the head alone, which then ends its stages
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            credential = StageCredential(self.name, self._key.seed, self._head_key)
            process.stdin.write(msgspec.json.encode(credential) + b"\n")
            with suppress(ConnectionError):  # it has ended already: its code says more
                await process.stdin.drain()
            async with asyncio.timeout(START_S):
                while line := (await process.stdout.readline()).decode("utf-8", "replace"):
                    if line.startswith(READY):
                        self._where = line.removeprefix(READY).strip()
                        self._reading = asyncio.create_task(_pass_on(process.stdout))
                        return
        except (OSError, TimeoutError) as error:
            process.kill()
            raise LinkClosed(f"{self.name} could not be started: {str(error) or 'it took too long'}") from error
        code = await process.wait()
        raise LinkClosed(f"{self.name} could not be started: its process ended with code {code}; this log says why")

    async def stop(self) -> None:
        """End the process by closing its input; kill it if that is not enough."""
        process = self.process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        await self.kill()

    async def kill(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        process = self.process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


async def _pass_on(output: asyncio.StreamReader) -> None:
    while line := await output.readline():
        log.info("%s", line.decode("utf-8", "replace").rstrip())
