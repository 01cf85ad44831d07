"""Check of the port of the settings: it is free, this program runs on it, or another one does."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

from paceline.commands.diagnosis.outcome import Found
from paceline.settings import NodeSettings

ANSWER_S = 5.0


def program(settings: NodeSettings) -> Found:
    """Say whether this side's program runs and can be asked, or whether its port is free."""
    where = f"{settings.host}:{settings.port}"
    fault = bind_fault(settings.host, settings.port)
    if fault is None:
        return "ok", f"nothing runs on {where}, which is free"
    found = _ready(_url(settings))
    if found is None:
        return "warn", f"{where} cannot be used ({fault}): stop what runs there or choose another"
    if found.get("side") != settings.side:
        return "warn", f"on {where} runs a program of the {found['side']}: stop it, or choose another port"
    text = f"runs on {where}, model {found.get('model')}, {_counted(found.get('documents'))}"
    linked = f"{found.get('peers', 0)} linked" if settings.side == "cloud" else _linked(found)
    models = _models(_url(settings))
    told = f"{text}, {linked}; {models}"
    if not found.get("ready"):
        return "fail", f"{told}; it cannot be asked now: {found.get('engine', 'it is stopping')}"
    return "ok", told


def bind_fault(host: str, port: int) -> str | None:
    """Why this port cannot be listened on; None where it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _counted(documents: object) -> str:
    return f"{documents} document{'' if documents == 1 else 's'}"


def _linked(found: Mapping[str, object]) -> str:
    return "linked with its cloud" if found.get("linked") else "not linked with a cloud"


def _url(settings: NodeSettings) -> str:
    """Where this machine reaches a program that listens as the settings say."""
    host = settings.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{settings.port}"
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _ready(url: str) -> Mapping[str, object] | None:
    """The body of `/readyz`; None where no program of this kind answers."""
    found = _get(f"{url}/readyz")
    return found if found is not None and "side" in found else None


def _models(url: str) -> str:
    found = _get(f"{url}/v1/models")
    listed = None if found is None else found.get("data")
    if not isinstance(listed, list):
        return "its models are listed for keys alone"
    chat = [each for each in listed if isinstance(each, dict) and ":" not in str(each.get("id"))]
    states = ((str(each.get("id")), each.get("paceline")) for each in chat)
    named = [f"{name} ({own['state']})" for name, own in states if isinstance(own, dict) and "state" in own]
    return f"models {', '.join(named)}"


def _get(url: str) -> Mapping[str, object] | None:
    import httpx

    try:
        found = httpx.get(url, timeout=ANSWER_S, trust_env=False).json()
    except (httpx.HTTPError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
