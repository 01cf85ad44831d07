"""Check of the optional extras: whether what is installed of them can be imported, which is not the same."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from paceline.commands.diagnosis.outcome import Found

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "keyring": ("keyring",),
    "nvml": ("pynvml",),
    "otel": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    "openai-ids": ("bpe_openai",),
    "bench": ("jsonschema", "matplotlib"),
    "gpu": ("triton",),
}
"""The modules of each extra that paceline imports; `test` and `lint` are of no use to who runs it."""


def extras() -> Found:
    """Import what is there of each extra."""
    works, absent, wrong = [], [], []
    for extra, modules in EXTRAS.items():
        faults = [_fault_of(module) for module in modules] + _unfit(extra)
        if None in faults:
            absent.append(extra)
        elif told := "; ".join(fault for fault in faults if fault):
            wrong.append(f"{extra} does not work ({told}): pip install 'paceline[{extra}]'")
        else:
            works.append(extra)
    lines = [*wrong, *([f"{', '.join(works)} work{'s' * (len(works) == 1)}"] if works else [])]
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    return "warn" if wrong else "ok", "; ".join(lines)


def _fault_of(module: str) -> str | None:
    """Why it cannot be imported; "" if it can; None if it is not there."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return None
        return f"{module}: {error}"
    except Exception as error:  # anything may be wrong with a package of others
        return f"{module}: {type(error).__name__}: {error}"
    return ""


def _unfit(extra: str) -> list[str]:
    """Packages of the extra in a release that paceline was not made for."""
    found = []
    try:
        wanted = [Requirement(line) for line in requires("paceline") or ()]
    except PackageNotFoundError:
        return []  # `packages` says so
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    return found
