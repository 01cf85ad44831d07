"""Tables of the file that settings are read from: `[answers]`, `[energy]`, `[outside]`, `[policy]`, `[tuning]` and its
units.

Settings without a flag, of all programs or inside the table of one. `paceline.settings` has those that people choose.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from paceline.core.addresses import is_loopback
from paceline.core.energy import MeterName
from paceline.core.policy import BUDGETS, DocumentRule, Grant, Pattern, Policy, Privacy, Rule
from paceline.system import cores

HOME: Final = os.path.expanduser("~")  # what `~` stands for in patterns


# ---- processing units of workflows, as tables of the file: [tuning.units.NAME] ----
Task = Literal["search", "rerank", "embed"]
TASKS: Final[tuple[Task, ...]] = get_args(Task)
_FOUND: Final = frozenset({"web", "link", "cloud", "outside"})  # names of units that are not declared


class UnitSettings(BaseModel):
    """One unit. kind `cpu`: a thread that searches, reranks and embeds; `engine`: the model, in so many lanes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["cpu", "engine"] = "cpu"
    cores: tuple[int, ...] = ()  # the only ones that its thread runs on
    does: Annotated[tuple[Task, ...], Field(min_length=1)] = TASKS  # of a thread
    lanes: int | None = Field(None, ge=1, le=64)  # of an engine: texts that are written at once

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.kind == "cpu" and self.lanes is not None:
            raise ValueError("only a unit of the kind engine has lanes")
        if self.kind == "engine" and self.does != TASKS:
            raise ValueError("a unit of the kind engine writes texts: leave does out")
        return self

    @field_validator("cores")
    @classmethod
    def _own_cores(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value and not hasattr(os, "sched_setaffinity"):
            raise ValueError("this system keeps no thread on a core")
        if value and not set(value) <= (allowed := cores()):
            raise ValueError(f"this process has the cores {sorted(allowed)}")
        return value


def _working_together(units: Mapping[str, UnitSettings]) -> Mapping[str, UnitSettings]:
    """The units, if they can. Raises ValueError."""
    for name in units:
        if not re.fullmatch(r"[A-Za-z][\w-]{0,31}", name) or name in _FOUND:
            raise ValueError(f"a unit cannot be called {name!r}: a letter, then letters, digits, _ and -, 32 at most")
    if sum(unit.kind == "engine" for unit in units.values()) > 1:
        raise ValueError("one unit of the kind engine at most: a node has one model")
    threads = [unit for unit in units.values() if unit.kind == "cpu"]
    if threads and (missing := [task for task in TASKS if not any(task in unit.does for unit in threads)]):
        raise ValueError(f"no unit does {' and '.join(missing)}")
    return units


class CheckedSettings(BaseModel):
    """Base of all settings: a number is not written as true or false."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_switch(cls, value: object, info: ValidationInfo) -> object:
        meant = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (meant, *get_args(meant)):
            raise ValueError("true and false are for switches, which it is not")
        return value


class Table(CheckedSettings):
    """Settings without a flag: a table of the file, of all programs or inside the table of one."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class AnswerSettings(Table):
    """`[answers]`: what holds where a request does not say."""

    documents: int = Field(2, ge=0, le=64, description="passages that each side reads")
    system: str | None = Field(None, max_length=65_536, description="system message of conversations that bring none")
    max_tokens_default: int | None = Field(None, ge=1, description="tokens written; default: up to the context")
    temperature: float | None = Field(None, ge=0, le=2, description="default: the model's generation_config.json, or 1")
    top_p: float | None = Field(None, ge=0, le=1, description="default: the model's, or 1")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="0: no limit; default: the model's, or 0")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the model's, or 0")
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, description="default: the model's, or 1")


class EnergySettings(Table):
    """`[energy]`: where the energy of answers is read, and what a machine takes that measures none."""

    meter: MeterName = Field(
        "auto",
        description="rapl (processors), nvml (an NVIDIA GPU), battery; power or workload: modelled from what follows; "
        "off; auto: what this machine measures, else modelled",
    )
    compute_watts: float = Field(12.0, gt=0, le=100_000, description="power while the engine computes, W")
    send_watts: float = Field(0.2, ge=0, le=100_000, description="power while this side sends, W")
    compute_gflops: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="speed of the engine, 10^9 operations a second; energy is then modelled by the operations of each "
        "step; default: by its seconds",
    )


def _pattern(text: str) -> str:
    Pattern.parse(text, HOME)
    return text


Patterns = Annotated[
    tuple[Annotated[str, Field(max_length=1024), AfterValidator(_pattern)], ...], Field(max_length=1000)
]


class GrantSettings(BaseModel):
    """What one key, or one model, may at most."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reads: Patterns | None = None
    models: tuple[str, ...] | None = None
    privacy: Privacy = "open"
    confirms: bool = False

    def grant(self, whose: str) -> Grant:
        reads = None if self.reads is None else _patterns(self.reads)
        return Grant(whose, reads, self.models, self.privacy, self.confirms)


class PolicySettings(Table):
    """`[policy]`: what may leave, who may read what, and what a day may take; each narrows what requests ask for."""

    never_leaves: Patterns = Field(
        (),
        description="documents, whatever is written from which stays on its side: a folder, a file, a pattern, "
        "store:NAME or tag:KEY=VALUE",
    )
    public_passages_only: Patterns = Field(
        (), description="documents, for answers from which no more than the search query leaves a device"
    )
    ask_me: Patterns = Field((), description="documents that are read once their owner has confirmed each of them")
    keys: dict[str, GrantSettings] = Field(
        default_factory=dict,
        description="a table for each key by name, * for all others: reads (documents), models, privacy (the least "
        "strict level), confirms (it may confirm documents of ask_me)",
    )
    models: dict[str, GrantSettings] = Field(
        default_factory=dict, description="a table for each model by name: reads, privacy"
    )
    joules: float | None = Field(None, ge=0, description="of a day; nothing more is written when they are used up")
    bytes: int | None = Field(
        None, ge=0, description="sent to the other side in a day; answers stay here when they are used up"
    )
    cloud_tokens: int | None = Field(
        None, ge=0, description="tokens written with the other side in a day; answers then stay here"
    )

    def policy(self) -> Policy:
        named: tuple[tuple[Rule, tuple[str, ...]], ...] = (
            ("never leaves", self.never_leaves),
            ("public passages only", self.public_passages_only),
            ("ask me", self.ask_me),
        )
        return Policy(
            tuple(DocumentRule(rule, pattern) for rule, texts in named for pattern in _patterns(texts)),
            {name: each.grant(f"key {name}") for name, each in self.keys.items()},
            {name: each.grant(f"model {name}") for name, each in self.models.items()},
            {name: float(most) for name in BUDGETS if (most := getattr(self, name)) is not None},
        )


def _patterns(texts: Sequence[str]) -> tuple[Pattern, ...]:
    """The patterns, also by the real paths of the folders that they begin with: documents are known by these."""
    found: dict[str, Pattern] = {}
    for text in texts:
        found[text] = Pattern.parse(text, HOME)
        path = HOME + text[1:] if text.startswith("~/") else text
        fixed = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0] if re.search(r"[*?\[]", path) else path
        if path.startswith("/") and fixed and (real := os.path.realpath(fixed)) != fixed.rstrip("/"):
            found[real + path[len(fixed) :]] = Pattern.parse(real + path[len(fixed) :], HOME)
    return tuple(found.values())


class OutsideSettings(Table):
    """`[outside]`: an endpoint of a stranger that writes where a request asks for it."""

    url: str | None = Field(
        None,
        max_length=500,
        description="of an API like OpenAI's, as https://api.example.com/v1; default: none, nothing is asked of "
        "strangers",
    )
    model: str | None = Field(None, min_length=1, max_length=200, description="its name there")
    key: str | None = Field(None, repr=False, description="its key: set the variable, or keep the file private")
    entities: str | None = Field(
        None,
        description="model that finds names in what is sent, besides patterns: a directory, or the name of one that "
        "was downloaded; default: patterns alone",
    )

    @field_validator("url")
    @classmethod
    def _encrypted(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            url = urlsplit(value)
            here = url.scheme == "http" and is_loopback(url.hostname or "")
            is_known = bool(url.hostname) and url.port != 0 and not ("@" in url.netloc or url.query or url.fragment)
        except ValueError:
            is_known = here = False
        if not (is_known and (here or url.scheme == "https")):
            raise ValueError("must be an https URL such as https://api.example.com/v1; http on this machine alone")
        return value.rstrip("/")

    @field_validator("key")
    @classmethod
    def _sendable(cls, value: str | None) -> str | None:
        if value is not None and not all("!" <= letter <= "~" for letter in value):
            raise ValueError("must be ASCII letters, digits and signs, without spaces and line ends")
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.url is None) != (self.model is None):
            raise ValueError("url and model of [outside] belong together: set both")
        return self


class StageTuning(Table):
    """`[tuning]` of a stage."""

    threads: int | None = Field(
        None, ge=1, description="CPU threads of the engine at most; default: one for each physical core"
    )


class Tuning(StageTuning):
    """`[tuning]` of both programs that answer."""

    backend: Literal["auto", "hf", "llama_cpp", "paged"] = Field("auto", description="engine that runs the model")
    step_rows: int | None = Field(
        None,
        ge=1,
        le=1 << 16,
        description="tokens computed in one step of the engine: more for throughput, fewer for steady streams beside "
        "long prompts; default: 512, on a GPU 2048",
    )
    model_idle_minutes: float = Field(
        10.0, gt=0, le=525_600, description="minutes without a request after which a model but the first is unloaded"
    )
    document_kv_mib: int = Field(2048, ge=0, description="MiB of disk for the KV of documents; 0: none is kept")
    responses_mib: int = Field(256, ge=1, le=1 << 20, description="MiB of responses kept; the oldest go first")
    responses_days: float = Field(30.0, gt=0, le=3650, description="days for which responses are kept")
    longest_silent_answer: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="seconds that an answer in one piece may take, whose connection is kept open meanwhile; a client "
        "that says for how long it waits (x-stainless-read-timeout) is held no longer; 0: any time",
    )
    strangers_per_address: int = Field(
        512,
        ge=1,
        le=1024,
        description="connections of one address at once whose sender has shown no key or credential yet; the oldest of "
        "them is cut for one more",
    )
    local_users: Literal["own", "any"] = Field(
        "own", description="users of this machine let in while no key is required: any, or own, that is its and root"
    )
    reranker: str | None = Field(
        None,
        description="what workflows rerank with: late-interaction, or a cross-encoder, as a directory or the name of "
        "one that was downloaded; default: late interaction where the embedder is minilm, else none",
    )
    long_passages: int = Field(
        48, ge=1, le=1000, description="passages that the workflow long reads for a question, of this side's documents"
    )
    web_results: int = Field(3, ge=1, le=10, description="results of a web search whose pages are read")
    web_pages: int = Field(8, ge=1, le=64, description="pages of the web that one answer may read")
    units: Annotated[dict[str, UnitSettings], AfterValidator(_working_together)] = Field(
        default_factory=dict,
        description="processing units of workflows, a table for each; default: a thread, and the model in 4 lanes",
    )
    log_text: bool = Field(
        False,
        description="with log_level debug, log in machines.jsonl of the state directory what answers read and write, "
        "so that a fault can be run again; without it kinds and times alone",
    )
    emulate: str | None = Field(
        None,
        description="emulated link: rtt=100ms,jitter=20ms,rate=10mbit,loss=0.01, and pace of the engine: "
        "forward=60ms,row=0.5ms; default: both as they are",
    )


class ServerTuning(Tuning):
    """`[tuning]` of `paceline serve`."""

    relevance_temperature: float = Field(
        0.8,
        ge=0.01,
        le=100,
        description="cosine more for which a passage weighs e times as much; linked devices follow",
    )
    credential_hours: float = Field(
        24.0,
        gt=0,
        le=8760,
        description="hours for which a device's key holds; it is renewed over the link when half of them are over",
    )
    device_days: float = Field(
        30.0,
        ge=0,
        le=36_500,
        description="days without a link after which a device must be enrolled again; 0: it never must",
    )
    stage_format: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="number format of hidden rows between stages; auto: the model's, so that texts are the same"
    )
    draft_kv_mib: int | None = Field(
        None, ge=1, description="MiB of KV cache of the draft model; default: as kv_mib, of what is left then"
    )

    @model_validator(mode="after")
    def _renewable(self) -> Self:
        if 0 < self.device_days * 24 < self.credential_hours:
            raise ValueError(
                f"devices would be away too long before keys are renewed: device_days ({self.device_days:g}) must "
                f"be at least credential_hours ({self.credential_hours:g})"
            )
        return self


class AgentTuning(Tuning):
    """`[tuning]` of `paceline agent`."""

    cloud_texts: bool = Field(
        True,
        description="let agents of workflows that read nothing private (the question, pages of the web) write on the "
        "cloud's model, where that is faster and the request's level of privacy is open or document-private",
    )


# What holds where a constructor is given no settings.
ANSWERS: Final = AnswerSettings.model_validate({})
TUNING: Final = ServerTuning.model_validate({})
