"""Settings that both programs that answer have, with the checks of each value.

Knows nothing of models, stores or the network: whether a model exists is checked by the engine.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from paceline.configuration import UnitSettings, provider, units_of
from paceline.core.energy import MeterName
from paceline.core.side import Side

PREFIX = "PACELINE_"
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,40}://[^/\s]{1,255}")
SECRETS = frozenset({"api_keys", "code", "web_search"})
TRUSTING = frozenset(  # whom this machine believes, lets in and tells, and where what it knows lies
    {"cloud", "server", "code", "code_file", "cloud_may_ask", "cloud_texts", "share_distributions", "web_search"}
    | {"api_keys", "api_key_file", "local_users", "allowed_origins", "trusted_proxies", "host", "listen", "insecure"}
    | {"encrypt_documents", "docs_dir", "state_dir"}
)
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

    model: tuple[str, ...] = Field(
        ("demo",),
        min_length=1,
        description="demo, demo-causal, fake, a Hugging Face name (as NAME@REVISION for another than the newest), or a "
        "directory with safetensors. Given several times: the first is the default, and the one that writes together "
        "with the other side; the others are loaded when a request names them",
    )
    name: str | None = Field(None, description="name the first model is served under; default: the model's own")
    model_idle_minutes: float = Field(
        10.0, gt=0, le=525_600, description="minutes without a request after which a model but the first is unloaded"
    )
    host: str = Field("127.0.0.1", description="address to listen on; keys are required unless it is loopback")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0: any free one")
    state_dir: Path = Field(default=Path(), description="where credentials and caches are kept")
    docs_dir: Path = Field(
        default_factory=lambda data: data["state_dir"] / "docs",
        description="where documents and their index are kept; default: docs in the state directory",
    )
    embedder: str = Field(
        default_factory=lambda data: "hash" if data["model"][:1] == ("fake",) else "minilm",
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
        description="MiB of KV cache of each model for all answers together (backend paged; of the fake model 256 "
        "tokens each); "
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
    longest_silent_answer: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="seconds that an answer in one piece may take, whose connection is kept open meanwhile; a client "
        "that says for how long it waits (x-stainless-read-timeout) is held no longer; 0: any time",
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="of requests that name none; default: the model's generation_config.json, or 1"
    )
    top_p: float | None = Field(None, ge=0, le=1, description="likewise; default: the model's, or 1")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="likewise, 0 for no limit; default: the model's, or 0")
    min_p: float | None = Field(None, ge=0, le=1, description="likewise; default: the model's, or 0")
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, description="likewise; default: the model's, or 1")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severity that is logged")
    log_text: bool = Field(
        False,
        description="with --log-level debug, log in machines.jsonl of --state-dir what answers read and write, so that "
        "a fault can be run again; without it kinds and times alone",
    )
    log_format: Literal["text", "json"] = Field("text", description="of a line of the log; json: one object a line")

    @property
    def first_model(self) -> str:
        """The default, loaded at the start."""
        return self.model[0]

    @field_validator("model", "api_keys", "trusted_proxies", "allowed_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split lists at commas, as a variable holds several."""
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
            return tuple(key.strip() for part in parts for key in part.split(",") if key.strip())
        return value

    @field_validator("model")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((each for each in value if value.count(each) > 1), None):
            raise ValueError(f"{twice} is named twice")
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
