"""Settings of the programs that answer: one schema for flags, variables and files, with the checks of each value.

`paceline.settings_sources` resolves them once at start-up, `paceline.commands.options` makes the flags from the same
fields. What both programs have is in `paceline.node_settings`.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from paceline.configuration import STORE
from paceline.core.permission import MayAsk
from paceline.local_users import is_loopback
from paceline.node_settings import DERIVED as DERIVED
from paceline.node_settings import ENCRYPT
from paceline.node_settings import PREFIX as PREFIX
from paceline.node_settings import SECRETS as SECRETS
from paceline.node_settings import TRUSTING as TRUSTING
from paceline.node_settings import NodeSettings as NodeSettings
from paceline.node_settings import ProgramSettings as ProgramSettings
from paceline.node_settings import state_home as state_home


class ServerSettings(NodeSettings):
    """Settings of `paceline serve`."""

    table = "server"
    side = "cloud"

    state_dir: Path = Field(
        default_factory=lambda: state_home("cloud"),
        description="where credentials and caches are kept; default: $XDG_STATE_HOME/paceline/cloud",
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
    stages: tuple[str, ...] = Field(
        (),
        description="spread the model over stages, each with a span of its layers: 3 starts three processes here, "
        "local:2 one on each of two GPUs, HOST:PORT,HOST:PORT uses running ones (`paceline stage`); default: none",
    )
    stage_format: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="number format of hidden rows between stages; auto: the model's, so that texts are the same"
    )
    draft_model: str | None = Field(
        None,
        description="small model that drafts for the strategy pipeline, in this process: demo-causal, fake, a Hugging "
        "Face name or a directory, with the vocabulary of model; default: none, drafts come from look-up tables",
    )
    draft_kv_mib: int | None = Field(
        None, ge=1, description="MiB of KV cache of the draft model; default: as kv_mib, of what is left then"
    )

    @field_validator("stages", mode="before")
    @classmethod
    def _stage_list(cls, value: object) -> object:
        if isinstance(value, int):
            value = str(value)
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
            return tuple(each.strip() for part in parts for each in part.split(",") if each.strip())
        return value

    @model_validator(mode="after")
    def _stageable(self) -> Self:
        paced = any(part.split("=")[0].strip() in ("forward", "row") for part in (self.emulate or "").split(","))
        if self.stages and any(unit.kind == "engine" and unit.cores for unit in self.units):
            raise ValueError("the cores of an engine on stages are chosen for each stage's process, not by units")
        if self.stages and len(self.model) > 1:
            raise ValueError("stages spread one model: give one, or start a server for each")
        if self.stages and (self.first_model in ("demo", "fake") or self.backend == "hf" or paced):
            raise ValueError(
                "stages cannot be combined with model demo or fake (with demo-causal they can), backend hf, or an "
                "emulated pace of the engine"
            )
        return self

    @model_validator(mode="after")
    def _renewable(self) -> Self:
        if 0 < self.device_days * 24 < self.credential_hours:
            raise ValueError(
                f"devices would be away too long before keys are renewed: device_days ({self.device_days:g}) must "
                f"be at least credential_hours ({self.credential_hours:g})"
            )
        return self


class AgentSettings(NodeSettings):
    """Settings of `paceline agent`."""

    table = "agent"
    side = "device"

    port: int = Field(8001, ge=0, le=65_535, description="port to listen on; 0: any free one")
    state_dir: Path = Field(
        default_factory=lambda: state_home("device"),
        description="where credentials and caches are kept; default: $XDG_STATE_HOME/paceline/device",
    )
    cloud: str | None = Field(None, description="URL of the server, as http://HOST:PORT; default: none, alone")
    device: str = Field(
        default_factory=socket.gethostname, min_length=1, description="this device's name; default: the host's"
    )
    code: str | None = Field(
        None,
        repr=False,
        description="one-time enrolment code, from `paceline devices add` at the server. Other users of the machine "
        "see what is on a command line: give - to be asked for it or read it from standard input, or code_file",
    )
    code_file: Path | None = Field(None, description="file whose first line is that code; -: standard input")
    share_distributions: bool = Field(
        False,
        description="let the cloud's clients ask for privacy 'open': what the model predicts from this device's "
        "documents, though never their text, may then go to the cloud",
    )
    encrypt_documents: bool = Field(True, description=ENCRYPT)
    cloud_may_ask: str | None = Field(
        None,
        description="whether this device reads its private documents for clients of the cloud: off, on, or names of "
        "the cloud's keys (notebook,phone), which only an honest cloud tells truly; default: what was answered at "
        "enrolment, else off",
    )
    cloud_asks_per_minute: int = Field(
        60, ge=0, le=100_000, description="answers for clients of the cloud that this device joins in a minute; 0: any"
    )
    cloud_asks_per_hour: int = Field(1200, ge=0, le=1_000_000, description="likewise in an hour")
    energy_per_token: float | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="energy budget of drafting for the cloud, J a token of the answer, in the mean; default: none",
    )
    energy_per_step: float | None = Field(
        None, ge=0, le=1_000_000, description="likewise J a step of drafts, as in the paper; not together"
    )
    cloud_texts: bool = Field(
        True,
        description="let agents of workflows that read nothing private (the question, pages of the web) write on the "
        "cloud's model, where that is faster and the request's level of privacy is open or document-private",
    )
    insecure: bool = Field(False, description="allow an unencrypted link to a server on another machine")

    @field_validator("cloud_may_ask")
    @classmethod
    def _permission(cls, value: str | None) -> str | None:
        return None if value is None else str(MayAsk.parse(value))

    @field_validator("cloud")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        url = urlsplit(value)
        if url.scheme not in ("http", "https", "ws", "wss") or not url.hostname:
            raise ValueError("must be a URL such as http://127.0.0.1:8000 or https://example.org")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        budgets = self.energy_per_token, self.energy_per_step
        if None not in budgets:
            raise ValueError("energy_per_token and energy_per_step cannot be set together: leave one out")
        if budgets != (None, None) and self.energy_meter == "off":
            raise ValueError("an energy budget needs an energy_meter other than off")
        return self

    @model_validator(mode="after")
    def _searchable(self) -> Self:
        if self.web_search == STORE and self.cloud is None:
            raise ValueError("web_search store searches the cloud's documents: set cloud, or a SearXNG server's URL")
        return self

    @model_validator(mode="after")
    def _encrypted(self) -> Self:
        url = urlsplit(self.cloud or "")
        if self.cloud and url.scheme in ("http", "ws") and not is_loopback(url.hostname or "") and not self.insecure:
            raise ValueError(
                f"the link to {self.cloud} would not be encrypted: use an https URL, or set insecure if the network "
                "is your own"
            )
        return self


class StageSettings(ProgramSettings):
    """What a stage holds, where it listens, and how it proves itself."""

    table = "stage"
    side = "device"

    model: str = Field(
        "demo-causal", description="as for serve: demo-causal, a Hugging Face name, or a directory with safetensors"
    )
    layers: str | None = Field(
        None, description="its layers, as FIRST:STOP, such as 0:14; default: what the server plans for it"
    )
    listen: str = Field("127.0.0.1:0", description="address of its own, as HOST:PORT; port 0: any free one")
    server: str | None = Field(None, description="URL of the server it belongs to, as http://HOST:PORT")
    code: str | None = Field(
        None,
        repr=False,
        description="one-time code of `paceline devices add NAME --role stage`; - to be asked for it or read it from "
        "standard input, or code_file",
    )
    code_file: Path | None = Field(None, description="file whose first line is that code; -: standard input")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="number format of the weights")
    engine_device: str = Field("auto", description="where it computes: cpu, cuda or cuda:1; auto: a GPU if any")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: torch's choice")
    kv_mib: int | None = Field(None, ge=1, description="MiB of its KV cache; default: as for serve")
    state_dir: Path = Field(
        default_factory=lambda: state_home("device"),
        description="where its credential is kept; default: $XDG_STATE_HOME/paceline/device",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_format: Literal["text", "json"] = Field("text", description="of a line of the log; json: one object a line")
    credential: Literal["-"] | None = Field(
        None,
        description="-: read a credential from standard input, and end with it, as a stage that the server starts does",
    )

    @field_validator("layers")
    @classmethod
    def _span(cls, value: str | None) -> str | None:
        if value is not None:
            first, colon, stop = value.partition(":")
            if not (colon and first.isdecimal() and stop.isdecimal() and int(first) < int(stop)):
                raise ValueError("give FIRST:STOP, as 0:14 for the first fourteen")
        return value

    @property
    def span(self) -> tuple[int, int] | None:
        """(first layer, layer behind the last one)"""
        if self.layers is None:
            return None
        first, _, stop = self.layers.partition(":")
        return int(first), int(stop)

    @field_validator("server")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            raise ValueError("must be a URL such as http://127.0.0.1:8000 or https://example.org")
        return value

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()


SCHEMAS: tuple[type[NodeSettings], ...] = (ServerSettings, AgentSettings)
