"""Groups and descriptions of settings, and settings that are tables or sentences of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

# The settings in groups with titles, in the order in which people read them: what everybody sets comes first.
#
# `--help`, `--show-settings` and the log of a start have this order. A program shows those of a group that it has; a
# test sees to it that every setting of every program stands in one group.


GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": ("model", "name", "layers", "system"),
    "Address": ("port", "host", "listen", "public_url"),
    "Link": (
        "cloud",
        "server",
        "code",
        "code_file",
        "device",
        "insecure",
        "credential",
        "credential_hours",
        "device_days",
        "emulate",
    ),
    "Documents": (
        "documents",
        "docs_dir",
        "embedder",
        "reranker",
        "relevance_temperature",
        "document_kv_mib",
    ),
    "Privacy": (
        "cloud_may_ask",
        "cloud_asks_per_minute",
        "cloud_asks_per_hour",
        "share_distributions",
        "cloud_texts",
        "encrypt_documents",
    ),
    "Keys and access": (
        "api_key_file",
        "api_keys",
        "local_users",
        "allowed_origins",
        "trusted_proxies",
        "strangers_per_address",
    ),
    "Answers, where a request does not say": (
        "max_tokens_default",
        "longest_silent_answer",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
    ),
    "State": ("state_dir", "responses_mib", "responses_days"),
    "Logging": ("log_level", "log_text", "log_format"),
    "Engine and memory": (
        "engine_device",
        "threads",
        "kv_mib",
        "model_idle_minutes",
        "dtype",
        "backend",
        "step_rows",
        "step_sequences",
    ),
    "Model in stages": ("stages", "stage_format", "draft_model", "draft_kv_mib"),
    "Workflows and the web": (
        "web_search",
        "web_search_seconds",
        "web_results",
        "web_pages",
        "web_page_seconds",
        "web_page_mib",
        "units",
    ),
    "Energy": (
        "energy_meter",
        "energy_per_token",
        "energy_per_step",
        "compute_watts",
        "send_watts",
        "compute_gflops",
    ),
}


def grouped(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(title, name) of each of these settings, in the order of the groups. One in no group is left out."""
    known = set(names)
    return ((title, name) for title, group in GROUPS.items() for name in group if name in known)


# Processing units of workflows as they are declared: tables of the file, or one line each as flags and variables.
#
#     [agent.units.left]
#     cores = [0]
#     does = ["embed", "rerank"]
#
# is `left=cpu:cores=0:does=embed+rerank`. Knows nothing of the work itself.


Task = Literal["search", "rerank", "embed"]
TASKS: Final[tuple[Task, ...]] = ("search", "rerank", "embed")
RESERVED: Final = frozenset({"web", "link", "cloud"})  # names of units that are found, not declared
_NAME: Final = re.compile(r"[A-Za-z][\w-]{0,31}")


def _listed(value: object) -> object:
    """`0+1` as a list, as a line has it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return value.split("+") if isinstance(value, str) else value


class UnitSettings(BaseModel):
    """One unit. kind `cpu`: a thread that searches, reranks and embeds; `engine`: the model, in so many lanes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["cpu", "engine"] = "cpu"
    cores: Annotated[tuple[int, ...], BeforeValidator(_listed)] = ()  # the only ones that its thread runs on
    does: Annotated[tuple[Task, ...], BeforeValidator(_listed)] = TASKS  # of a thread
    lanes: int | None = Field(None, ge=1, le=64)  # of an engine: texts that are written at once

    def __str__(self) -> str:
        parts = [f"{self.name}={self.kind}"]
        if self.cores:
            parts.append(f"cores={'+'.join(map(str, self.cores))}")
        if self.kind == "cpu":
            parts.append(f"does={'+'.join(self.does)}")
        if self.lanes is not None:
            parts.append(f"lanes={self.lanes}")
        return ":".join(parts)

    __repr__ = __str__


def units_of(value: object) -> object:
    """Units of tables, or of lines that may be joined by commas. Raises ValueError with a sentence."""
    if isinstance(value, Mapping):
        return checked(_from_table(str(name), table) for name, table in value.items())
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
        lines = [line.strip() for part in parts for line in part.split(",")]
        return checked(_from_line(line) for line in lines if line)
    raise ValueError("give tables such as [agent.units.left], or lines such as left=cpu:cores=0")


def checked(found: Iterable[UnitSettings]) -> tuple[UnitSettings, ...]:
    """The units, if they work together. Raises ValueError with a sentence."""
    units = tuple(found)
    names = [unit.name for unit in units]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two units are called {twice}")
    for unit in units:
        _check(unit)
    if sum(unit.kind == "engine" for unit in units) > 1:
        raise ValueError("one unit of the kind engine at most: a node has one model")
    threads = [unit for unit in units if unit.kind == "cpu"]
    if threads and (missing := [task for task in TASKS if not any(task in unit.does for unit in threads)]):
        raise ValueError(f"no unit does {' and '.join(missing)}")
    return units


def _check(unit: UnitSettings) -> None:
    if not _NAME.fullmatch(unit.name) or unit.name in RESERVED:
        raise ValueError(f"a unit cannot be called {unit.name!r}: a letter, then letters, digits, _ and -, 32 at most")
    if unit.kind == "cpu" and unit.lanes is not None:
        raise ValueError(f"the unit {unit.name} has lanes, which only the kind engine has")
    if unit.kind == "engine" and unit.does != TASKS:
        raise ValueError(f"the unit {unit.name} is an engine, which writes texts: leave does out")
    if unit.kind == "cpu" and not unit.does:
        raise ValueError(f"the unit {unit.name} does nothing: give {', '.join(TASKS)}")
    if not unit.cores:
        return
    if len(set(unit.cores)) < len(unit.cores):
        raise ValueError(f"the unit {unit.name} names a core twice")
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"the unit {unit.name} names cores, and this system keeps no thread on a core")
    allowed = os.sched_getaffinity(0)
    if wrong := sorted(set(unit.cores) - allowed):
        raise ValueError(f"the unit {unit.name} may not run on the cores {wrong}: this process has {sorted(allowed)}")


def _from_table(name: str, table: object) -> UnitSettings:
    if not isinstance(table, Mapping):
        raise ValueError(f"the unit {name} must be a table")
    if "name" in table:
        raise ValueError(f"the unit {name} has its name from its table: leave name out")
    return _made({**table, "name": name})


def _from_line(line: str) -> UnitSettings:
    name, equals, rest = line.partition("=")
    kind, *options = rest.split(":")
    if not equals or not kind:
        raise ValueError(f"{line[:80]!r} is no unit: give NAME=KIND:cores=0+1:does=rerank+embed, with what it needs")
    pairs = [option.partition("=")[::2] for option in options]
    given = dict(pairs)
    if len(given) < len(pairs) or "name" in given:
        raise ValueError(f"{line[:80]!r} says something of its unit twice")
    return _made({**given, "name": name.strip(), "kind": kind.strip()})


def _made(fields: Mapping[str, object]) -> UnitSettings:
    try:
        return UnitSettings.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        where = str(fault["loc"][0]) if fault["loc"] else "name"
        if fault["type"] == "extra_forbidden":
            known = ", ".join(key for key in UnitSettings.model_fields if key != "name")
            raise ValueError(f"the unit {fields['name']} has no {where}: it may have {known}") from None
        message = fault["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where} of the unit {fields['name']}: {message[:1].lower()}{message[1:]}") from None


# The setting `web_search`: what the workflow `research` searches the web with. Knows nothing of searching.


STORE: Final = "store"  # the cloud's public documents stand for the web


def provider(value: str | None) -> str | None:
    """The setting as given, if it may be. Raises ValueError with a sentence."""
    if value is None or value == STORE:
        return value
    try:
        url = urlsplit(value)
        named = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        named = False
    if not named:
        raise ValueError("must be the URL of a SearXNG server, such as http://127.0.0.1:8080, or store")
    return value.rstrip("/")
