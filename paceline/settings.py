"""Settings of the programs that answer: one schema for flags, variables and files, with the checks of each value.

`paceline.settings_sources` resolves them once at start-up, `paceline.commands.options` makes the flags from the same
fields. Knows nothing of models, stores or the network: whether a model exists is checked by the engine.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from paceline.core.energy.values import MeterName
from paceline.core.permission import MayAsk
from paceline.core.side import Side
from paceline.local_users import is_loopback
from paceline.unit_settings import UnitSettings, units_of
from paceline.web_settings import STORE, provider

PREFIX = "PACELINE_"
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,40}://[^/\s]{1,255}")
SECRETS = frozenset({"api_keys", "code", "web_search"})
DERIVED = frozenset({"state_dir", "docs_dir", "embedder", "device"})  # their default depends on the machine or a field

ENCRYPT = "encrypt documents, stored responses and look-up tables on the disk, at the next start and for good"


def state_home(side: Side) -> Path:
    """Default state directory of a side: $XDG_STATE_HOME/paceline/SIDE."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "paceline" / side


class ProgramSettings(BaseModel):
    """Settings of one program. Frozen; paths are absolute; relations between fields have been checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    table: ClassVar[str]  # this program's table in the file
    side: ClassVar[Side]


class NodeSettings(ProgramSettings):
    """Settings of both programs that answer."""

    model: str = Field(
        "demo", description="demo, demo-causal, fake, a Hugging Face name, or a directory with safetensors"
    )
    name: str | None = Field(None, description="name the model is served under; default: the model's own")
    host: str = Field("127.0.0.1", description="address to listen on; keys are required unless it is loopback")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0: any free one")
    state_dir: Path = Field(default=Path(), description="where credentials and caches are kept")
    docs_dir: Path = Field(
        default_factory=lambda data: data["state_dir"] / "docs",
        description="where documents and their index are kept; default: docs in the state directory",
    )
    embedder: str = Field(
        default_factory=lambda data: "hash" if data["model"] == "fake" else "minilm",
        description="minilm, hash, or a sentence-transformers name; default: minilm (hash when the model is fake)",
    )
    relevance_temperature: float = Field(
        0.8, ge=0.01, le=100, description="cosine more for which a passage weighs e times as much; as the other side's"
    )
    backend: Literal["auto", "hf", "paged"] = Field("auto", description="engine that runs the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="number format of the weights")
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; default: torch's choice")
    engine_device: str = Field("auto", description="where the model runs: cpu, cuda or cuda:1; auto: a GPU if any")
    kv_mib: int | None = Field(
        None,
        ge=1,
        description="MiB of KV cache for all answers together (backend paged; of the fake model 256 tokens each); "
        "default: nine tenths of what the weights leave on a GPU, a quarter of the free memory on a CPU, of which "
        "four contexts stay filled for later prompts",
    )
    step_rows: int | None = Field(
        None,
        ge=1,
        le=1 << 16,
        description="tokens computed in one step of the engine: more for throughput, fewer for steady streams beside "
        "long prompts; default: 512, on a GPU 2048",
    )
    step_sequences: int = Field(256, ge=1, le=4096, description="answers continued in one step of the engine")
    public_url: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]{1,500}$",
        description="address under which clients reach this side, for the links of citations; default: that by which "
        "each request came",
    )
    api_keys: tuple[str, ...] = Field(
        (),
        repr=False,
        description="keys for clients, as KEY, or KEY=DEVICE to bind one to a device; besides those of paceline keys. "
        "Other users of the machine see what is on a command line: give - to read them from standard input, one a "
        "line, or api_key_file",
    )
    api_key_file: Path | None = Field(
        None, description="file with keys as of api_keys, one a line; -: standard input; default: none"
    )
    strangers_per_address: int = Field(
        512,
        ge=1,
        le=1024,
        description="connections of one address at once whose sender has shown no key or credential yet; the oldest of "
        "them is cut for one more",
    )
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="addresses or networks of reverse proxies in front, whose X-Forwarded-For says which address a "
        "request counts for; default: none, and a proxy's address counts for all behind it",
    )
    local_users: Literal["own", "any"] = Field(
        "own", description="users of this machine let in while no key is required: any, or own, that is its and root"
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        description="origins let in likewise, as chrome-extension://ID, besides local pages and app://; default: none",
    )
    emulate: str | None = Field(
        None,
        description="emulated link: rtt=100ms,jitter=20ms,rate=10mbit,loss=0.01, and pace of the engine: "
        "forward=60ms,row=0.5ms; default: both as they are",
    )
    energy_meter: MeterName = Field(
        "auto",
        description="where the energy of answers is read: rapl (processors), nvml (an NVIDIA GPU), battery; power or "
        "workload: modelled from the settings below; off; auto: what this machine measures, else modelled",
    )
    compute_watts: float = Field(
        12.0, gt=0, le=100_000, description="power while the engine computes, W, where it is not measured"
    )
    send_watts: float = Field(0.2, ge=0, le=100_000, description="power while this side sends, W")
    compute_gflops: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="speed of the engine, 10^9 operations a second; energy is then modelled by the operations of each "
        "step; default: by its seconds",
    )
    document_kv_mib: int = Field(
        2048,
        ge=0,
        description="MiB of disk at most for the KV of documents, kept so that each is computed once; 0: none is kept",
    )
    encrypt_documents: bool = Field(False, description=ENCRYPT)
    responses_mib: int = Field(
        256, ge=1, le=1 << 20, description="MiB of responses that are kept at most; the oldest go first"
    )
    responses_days: float = Field(30.0, gt=0, le=3650, description="days for which responses are kept")
    units: tuple[UnitSettings, ...] = Field(
        (),
        description="processing units of workflows, as NAME=cpu:cores=0:does=search+rerank+embed for a thread, "
        "NAME=engine:lanes=4 for the model, or tables [agent.units.NAME]; default: a thread, and the model in 4 lanes",
    )
    reranker: str | None = Field(
        None,
        description="what workflows rerank with: late-interaction, or a cross-encoder, as a directory or the name of "
        "one that was downloaded; default: late interaction where the embedder is minilm, else none",
    )
    web_search: str | None = Field(
        None,
        repr=False,
        description="what the workflow research searches the web with: the URL of a SearXNG server, or store, the "
        "cloud's documents in place of the web; default: none, and research is refused",
    )
    web_search_seconds: float = Field(10.0, gt=0, le=300, description="seconds that a web search may take")
    web_results: int = Field(3, ge=1, le=10, description="results of a web search whose pages are read")
    web_pages: int = Field(8, ge=1, le=64, description="pages of the web that one answer may read")
    web_page_seconds: float = Field(20.0, gt=0, le=300, description="seconds that fetching a page may take")
    web_page_mib: int = Field(8, ge=1, le=64, description="MiB of a page at most, decompressed")
    documents: int = Field(2, ge=0, le=64, description="passages each side reads per request, unless the request says")
    system: str | None = Field(
        None, max_length=65_536, description="system message of conversations that bring none; default: none"
    )
    max_tokens_default: int | None = Field(
        None, ge=1, description="tokens written when a request sets no limit; default: up to the context"
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="of requests that name none; default: the model's generation_config.json, or 1"
    )
    top_p: float | None = Field(None, ge=0, le=1, description="likewise; default: the model's, or 1")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="likewise, 0 for no limit; default: the model's, or 0")
    min_p: float | None = Field(None, ge=0, le=1, description="likewise; default: the model's, or 0")
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, description="likewise; default: the model's, or 1")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_format: Literal["text", "json"] = Field("text", description="of a line of the log; json: one object a line")

    @field_validator("api_keys", "trusted_proxies", "allowed_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split lists at commas, as a variable holds several."""
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
            return tuple(key.strip() for part in parts for key in part.split(",") if key.strip())
        return value

    @field_validator("units", mode="before")
    @classmethod
    def _units(cls, value: object) -> object:
        return value if value == () else units_of(value)

    @field_validator("web_search")
    @classmethod
    def _provider(cls, value: str | None) -> str | None:
        return provider(value)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_network(each, strict=False)
            except ValueError:
                raise ValueError(f"{each[:80]!r} is not an address or a network such as 10.0.0.0/8") from None
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(ORIGIN.fullmatch(each) for each in value):
            raise ValueError("each must be an origin such as chrome-extension://ID")
        return tuple(map(str.lower, value))

    @field_validator("state_dir", "docs_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()


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
        if self.stages and (self.model in ("demo", "fake") or self.backend == "hf" or paced):
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
        30, ge=1, le=100_000, description="answers for clients of the cloud that this device joins in a minute"
    )
    cloud_asks_per_hour: int = Field(300, ge=1, le=1_000_000, description="likewise in an hour")
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


SCHEMAS: tuple[type[NodeSettings], ...] = (ServerSettings, AgentSettings)
