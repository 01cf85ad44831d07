"""Parameters of endpoints: `Annotated[..., Depends(...)]`, in place of globals.

All of it hangs on `app.state`, where `create_app` puts it. They are coroutines: FastAPI runs others on threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from paceline.api.generation.links import NO_ADDRESSES, Addresses
from paceline.api.http.admission import AdmissionControl
from paceline.api.http.auth import Identity
from paceline.runtime.service import Service

LONGEST_S = 600.0  # of an answer in one piece, where the settings say nothing else; OpenAI's clients wait as long
KEEP_ALIVE_S = 15.0  # a quarter of the 60 s after which nginx gives up on a silent upstream


@dataclass(frozen=True, slots=True)
class Settings:
    """The program's settings that concern answers.

    `documents`: passages per side where the request sets none. `keep_alive`: s of silence before a comment or a space
    is sent. `addresses`: under which cited passages are shown. `longest_silent`: s that an answer in one piece may
    take; 0: any.
    """

    documents: int = 2
    keep_alive: float = KEEP_ALIVE_S
    addresses: Addresses = NO_ADDRESSES
    longest_silent: float = LONGEST_S


DEFAULTS = Settings()


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _admission(request: Request) -> AdmissionControl:
    admission: AdmissionControl = request.app.state.admission
    return admission


async def _caller(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


ServiceDep = Annotated[Service, Depends(_service)]
SettingsDep = Annotated[Settings, Depends(_settings)]
AdmissionDep = Annotated[AdmissionControl, Depends(_admission)]
Caller = Annotated[Identity, Depends(_caller)]
"""The key behind the request; empty where none is needed."""
