"""Check of the link to the cloud for `paceline doctor`: address, certificate, keys, protocol version, tokenizers.

It shakes hands as far as the cloud's verdict, and names no strategy, so that the cloud refuses it at last: nothing is
linked, and an agent that runs keeps its link.
"""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

import httpx

from paceline.commands.diagnosis import local_folder
from paceline.commands.options import Found
from paceline.core.addresses import is_loopback
from paceline.errors import ConfigError, LinkClosed
from paceline.runtime.identity import device_handshake
from paceline.runtime.link.connection import Link
from paceline.runtime.link.transport import UNUSABLE, dial, unreachable
from paceline.secret_files import STDIN
from paceline.settings import AgentSettings, NodeSettings
from paceline.wire.close_codes import CloseCode
from paceline.wire.identity import CODE, UNLIKE, normalised
from paceline.wire.messages import VERSION, Introduction

from .cloud import Credential, Credentials, http_url, link_url

ANSWER_S = 10.0
UNKNOWN = "-"  # in place of a tokenizer's fingerprint


def cloud_link(settings: NodeSettings) -> Found | None:
    """None for a server's settings. Raises ConfigError for a credential that cannot be read."""
    if not isinstance(settings, AgentSettings):
        return None
    if settings.cloud is None:
        return "ok", "these settings name no cloud: an agent that is started with them answers alone"
    cloud, *_ = settings.clouds
    credential = next(
        filter(None, (Credentials(settings.state_dir).get(http_url(url)) for url in settings.clouds)), None
    )
    if credential is None:
        return _unenrolled(settings, cloud)
    return asyncio.run(_shake_hands(settings, cloud, credential))


def _unenrolled(settings: AgentSettings, cloud: str) -> Found:
    fault = _unreachable(cloud)
    if fault is not None:
        return "fail", f"{fault}. Nor is this device enrolled there"
    if settings.code not in (None, STDIN) and not CODE.fullmatch(normalised(str(settings.code))):
        return "fail", "not enrolled, and what is set as the code cannot be one: it looks like K7QF-2M9X-4TBA-9HJC"
    if settings.code is not None or settings.code_file is not None:
        return "warn", f"{cloud} answers; not enrolled yet: the start of the agent uses the code, which holds once"
    advice = f"run `paceline devices add {settings.device}` at the server and start the agent once with `--code -`"
    return "fail", f"{cloud} answers, but this device is not enrolled there: {advice}"


def _unreachable(cloud: str) -> str | None:
    """Why the cloud cannot be asked; None where it answers."""
    url = http_url(cloud)
    is_local = is_loopback(urlsplit(url).hostname or "")
    trusted = ssl.create_default_context()
    try:  # as enrolment asks
        httpx.get(f"{url}/healthz", timeout=ANSWER_S, trust_env=not is_local, verify=trusted)
    except (httpx.TransportError, *UNUSABLE) as error:
        return unreachable(cloud, error)
    return None


async def _shake_hands(settings: AgentSettings, cloud: str, credential: Credential) -> Found:
    tokenizer = await asyncio.to_thread(_tokenizer, settings)
    introduction = Introduction(tokenizer, model="", model_name="", strategies=[], documents=0)
    handshake = device_handshake(
        introduction, device=credential.device, keys=credential.keys, server_key=credential.server_key
    )
    try:
        async with asyncio.timeout(ANSWER_S):
            link = Link(await dial(link_url(cloud)), handshake)
            await link.run()
    except (LinkClosed, TimeoutError) as error:
        return "warn", f"{str(error) or f'{cloud} does not answer'}. Until then this device answers alone"
    known = f"{cloud} proves its key and knows {credential.device}; protocol version {VERSION}"
    if link.close_code == CloseCode.NO_COMMON_STRATEGY:
        if UNLIKE not in (link.close_reason or ""):
            return "ok", f"{known}, and a model with the same tokenizer"
        if tokenizer == UNKNOWN:
            return "ok", f"{known}; its tokenizer is compared once the model is here"
        return "ok", f"{known}; its model has another vocabulary: this device reads its passages and writes by itself"
    return "fail", f"{cloud}: {link.close_reason}"


def _tokenizer(settings: AgentSettings) -> str:
    """Fingerprint of the first model's tokenizer; UNKNOWN for a model that is not here or cannot be used."""
    from paceline.engine.loader import describe_model

    try:
        wanted = settings.first_model
        folder = wanted if wanted.startswith("fake") else local_folder(settings, wanted)
        return UNKNOWN if folder is None else describe_model(folder, name=wanted).tokenizer
    except ConfigError:
        return UNKNOWN
