"""Settings of the programs: one schema for flags, variables and the file, with the checks of each value.

What people choose is a field of a program, with a flag that `--help` shows. The rest are fields of `[answers]`,
`[energy]`, `[outside]`, `[policy]` and `[tuning]`, tables of the file. `paceline.settings_sources` resolves them once
at start-up. Knows nothing of models, stores or the network: whether a model exists is checked by the engine.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from paceline.core.addresses import database_name, is_loopback
from paceline.core.side import HandoffLevel, MayAsk, Side
from paceline.settings_tables import (
    AgentTuning,
    AnswerSettings,
    CheckedSettings,
    EnergySettings,
    OutsideSettings,
    PolicySettings,
    ServerTuning,
    StageTuning,
    Tuning,
)

PREFIX = "PACELINE_"
STORE: Final = "store"  # as `web_search`: the cloud's public documents stand for the web
SECRETS = frozenset({"api_keys", "code", "engine_key", "web_search", "database", "outside.key"})
TRUSTING = frozenset(  # whom this machine believes, lets in and tells, and where what it knows lies
    {"cloud", "server", "code", "code_file", "cloud_may_ask", "share_distributions", "web_search", "tuning.cloud_texts"}
    | {"api_keys", "api_key_file", "allowed_origins", "trusted_proxies", "host", "listen", "insecure"}
    | {"encrypt_documents", "docs_dir", "state_dir", "tuning.local_users", "engine_url", "database", "server_url"}
    | {"outside.url", "outside.key"}
)
DERIVED = frozenset(
    {"state_dir", "docs_dir", "embedder", "device", "server_url"}
)  # their default depends on the machine or a field
ENCRYPT = "encrypt documents, stored responses and look-up tables on the disk, at the next start and for good"
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,40}://[^/\s]{1,255}")


def state_home(side: Side) -> Path:
    """Default state directory of a side: $XDG_STATE_HOME/paceline/SIDE."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "paceline" / side


def variable(path: str) -> str:
    """The environment variable of a setting; of one in a table, TABLE.KEY."""
    return f"{PREFIX}{path.replace('.', '_').upper()}"


def _several(value: Any) -> Any:
    """Split texts at commas, as a variable holds several."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
        return tuple(key.strip() for part in parts for key in part.split(",") if key.strip())
    return value


def _named(value: Any) -> Any:
    if value == "":  # which is the working directory to `Path`
        raise ValueError("it is empty: leave it out for the default, or write . for the working directory")
    return value


def _address(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s?#]{1,500}", value):
        raise ValueError("give an address such as https://paceline.example.org, without ? or #")
    return value


Several = Annotated[tuple[str, ...], BeforeValidator(_several)]
Folder = Annotated[Path, BeforeValidator(_named), AfterValidator(lambda value: value.expanduser().absolute())]
Address = Annotated[str, AfterValidator(_address)]
NumberFormat = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]


# ---- programs ----
class ProgramSettings(CheckedSettings):
    """Settings of one program. Frozen; paths are absolute; relations between fields have been checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    table: ClassVar[str]  # this program's table in the file
    side: ClassVar[Side]


class NodeSettings(ProgramSettings):
    """Settings of both programs that answer."""

    model: Several = Field(
        ("demo",),
        min_length=1,
        description="demo, demo-causal, fake, a Hugging Face name (as NAME@REVISION for another than the newest), a "
        "directory with safetensors, or a GGUF file. Given several times: the first is the default, and the one that "
        "writes together with the other side; the others are loaded when a request names them",
    )
    name: str | None = Field(None, description="name the first model is served under; default: the model's own")
    model_alias: Several = Field((), description="further names of models, as gpt-4o=MODEL, or gpt-4o of the first")
    embedding_alias: Several = Field((), description="further names of the embedder, as text-embedding-3-small")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0: any free one")
    host: str = Field("127.0.0.1", description="address to listen on; keys are required unless it is loopback")
    public_url: Address | None = Field(
        None, description="address by which clients reach this side, in links of citations; default: as each came"
    )
    state_dir: Folder = Field(default=Path(), description="where credentials and caches are kept")
    docs_dir: Folder = Field(
        default_factory=lambda data: data["state_dir"] / "docs",
        description="where documents and their index are kept; default: docs in the state directory",
    )
    embedder: str = Field(
        default_factory=lambda data: "hash" if data["model"][:1] == ("fake",) else "minilm",
        description="minilm, hash, or a sentence-transformers name; default: minilm (hash when the model is fake)",
    )
    encrypt_documents: bool = Field(False, description=ENCRYPT)
    api_keys: Several = Field(
        (),
        repr=False,
        description="keys for clients, as KEY, or KEY=DEVICE to bind one to a device (at an agent: KEY=NAME to name it "
        "for [policy]); besides those of paceline keys. Other users of the machine see what is on a command "
        "line: give - to read them from standard input, one a line, or api_key_file",
    )
    api_key_file: Path | None = Field(
        None, description="file with keys as of api_keys, one a line; -: standard input; default: none"
    )
    trusted_proxies: Several = Field(
        (),
        description="addresses or networks of reverse proxies in front, whose X-Forwarded-For says which address a "
        "request counts for, and X-Forwarded-Proto whether it came by https; default: none, and a proxy's address "
        "counts for all behind it",
    )
    allowed_origins: Several = Field(
        (),
        description="origins let in while no key is required, as chrome-extension://ID, besides local pages and "
        "app://; default: none",
    )
    engine_device: str = Field("auto", description="where the model runs: cpu, cuda or cuda:1; auto: a GPU if any")
    dtype: NumberFormat = Field("auto", description="number format of the weights")
    quantize: Literal["q8_0", "q4_0"] | None = Field(None, description="convert safetensors to it once, for llama.cpp")
    kv_mib: int | None = Field(
        None,
        ge=1,
        description="MiB of KV cache of each model for all answers together (backend paged; of the fake model 256 "
        "tokens each); default: nine tenths of what the weights leave on a GPU, a quarter of the free memory on a CPU, "
        "of which four contexts stay filled for later prompts",
    )
    debug_options: bool = Field(
        False,
        description="accept paceline.debug in requests, which chooses forms of strategies for measurements, such as a "
        "paper's own",
    )
    web_search: str | None = Field(
        None,
        repr=False,
        description="what the workflow research searches the web with: the URL of a SearXNG server, or store, the "
        "cloud's documents in place of the web; default: none, and research is refused",
    )
    log_level: LogLevel = Field("info", description="least severity that is logged")
    log_format: Literal["text", "json"] = Field("text", description="of a line of the log; json: one object a line")
    answers: AnswerSettings = Field({}, validate_default=True)
    energy: EnergySettings = Field({}, validate_default=True)
    outside: OutsideSettings = Field({}, validate_default=True)
    policy: PolicySettings = Field({}, validate_default=True)
    tuning: Tuning = Field({}, validate_default=True)

    @property
    def first_model(self) -> str:
        return self.model[0]

    @field_validator("model")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := next((each for each in value if value.count(each) > 1), None):
            raise ValueError(f"{twice} is named twice")
        return value

    @field_validator("web_search")
    @classmethod
    def _provider(cls, value: str | None) -> str | None:
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
        if not all(_ORIGIN.fullmatch(each) for each in value):
            raise ValueError("each must be an origin such as chrome-extension://ID")
        return tuple(map(str.lower, value))


class ServerSettings(NodeSettings):
    """Settings of `paceline serve`."""

    table = "server"
    side = "cloud"

    state_dir: Folder = Field(
        default_factory=lambda: state_home("cloud"),
        description="where credentials and caches are kept; default: $XDG_STATE_HOME/paceline/cloud",
    )
    database: Annotated[str, AfterValidator(lambda url: database_name(url) and url)] | None = Field(
        None,
        repr=False,
        description="PostgreSQL, as postgresql://USER@HOST/NAME, in which several servers keep what they keep "
        "together; default: files in the state directory",
    )
    server_url: Address | None = Field(None, description="address of this one for them; default: http://HOST:PORT")
    stages: Annotated[Several, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)] = Field(
        (),
        description="spread the model over stages, each with a span of its layers: 3 starts three processes here, "
        "local:2 one on each of two GPUs, HOST:PORT,HOST:PORT uses running ones (`paceline stage`); default: none",
    )
    engine_url: Several = Field(
        (),
        description="servers that run the model, such as vLLM's, as http://HOST:PORT; of several that are alike one is "
        "asked, and another when it is lost. --model then gives its tokenizer. A key of theirs: PACELINE_ENGINE_KEY",
    )
    engine_key: str | None = Field(
        None, repr=False, description="their key. Other users see what is on a command line: set the variable"
    )
    draft_model: str | None = Field(
        None,
        description="small model that drafts for answers written here alone, in this process: demo-causal, fake, a "
        "Hugging Face name or a directory, with the vocabulary of model; default: none, look-up tables alone draft",
    )
    tuning: ServerTuning = Field({}, validate_default=True)

    @field_validator("engine_url")
    @classmethod
    def _servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for parts in map(urlsplit, value):  # which stand in logs and errors
            if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
                raise ValueError("each must be a URL such as http://gpu:8000; a password is given by engine_key")
        return tuple(url.rstrip("/").removesuffix("/v1") for url in value)

    @model_validator(mode="after")
    def _far(self) -> Self:
        more = self.stages or self.draft_model or self.quantize or self.model[1:]
        if self.engine_url and (more or self.first_model == "demo"):
            raise ValueError("engine_url needs one model, by its name or folder, no stages, draft_model or quantize")
        if self.database and self.encrypt_documents:
            raise ValueError("encrypt_documents is for files of one machine: have the database's disks encrypted")
        return self

    @model_validator(mode="after")
    def _stageable(self) -> Self:
        if not self.stages:
            return self
        if any(unit.kind == "engine" and unit.cores for unit in self.tuning.units.values()):
            raise ValueError("the cores of an engine on stages are chosen for each stage's process, not by units")
        if len(self.model) > 1:
            raise ValueError("stages spread one model: give one, or start a server for each")
        emulated = (self.tuning.emulate or "").split(",")
        paced = any(part.split("=")[0].strip() in ("forward", "row") for part in emulated)
        if self.first_model in ("demo", "fake") or self.tuning.backend == "hf" or paced or self.quantize:
            raise ValueError(
                "stages cannot be combined with model demo or fake (with demo-causal they can), backend hf, quantize, "
                "or an emulated pace of the engine"
            )
        return self


def _checked_url(value: str, *schemes: str) -> str:
    if urlsplit(value).scheme not in schemes or not urlsplit(value).hostname:
        raise ValueError("must be a URL such as http://127.0.0.1:8000 or https://example.org")
    return value


class AgentSettings(NodeSettings):
    """Settings of `paceline agent`."""

    table = "agent"
    side = "device"

    port: int = Field(8001, ge=0, le=65_535, description="port to listen on; 0: any free one")
    state_dir: Folder = Field(
        default_factory=lambda: state_home("device"),
        description="where credentials and caches are kept; default: $XDG_STATE_HOME/paceline/device",
    )
    encrypt_documents: bool = Field(True, description=ENCRYPT)
    cloud: str | None = Field(None, description="URL of the server, or several of one database; default: none, alone")
    device: str = Field(default_factory=socket.gethostname, min_length=1, description="its name; default: the host's")
    code: str | None = Field(
        None,
        repr=False,
        description="one-time enrolment code, from `paceline devices add` at the server. Other users of the machine "
        "see what is on a command line: give - to be asked for it or read it from standard input, or code_file",
    )
    code_file: Path | None = Field(None, description="file whose first line is that code; -: standard input")
    insecure: bool = Field(False, description="allow an unencrypted link to a server on another machine")
    share_distributions: bool = Field(
        False,
        description="let the cloud's clients ask for privacy 'open': predictions from this device's documents, though "
        "never their text, may then go to the cloud",
    )
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
        None, ge=0, le=1e6, description="energy budget of drafting for the cloud, mean J a token of the answer"
    )
    handoff: HandoffLevel = Field(
        "off",
        description="which answers this device writes by itself though its cloud's model is larger, as long as it is "
        "sure enough: quality hands over most, balanced, cheap least; off: everything is the cloud's",
    )
    tuning: AgentTuning = Field({}, validate_default=True)

    @field_validator("cloud_may_ask")
    @classmethod
    def _permission(cls, value: str | None) -> str | None:
        return None if value is None else str(MayAsk.parse(value))

    @field_validator("cloud")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        urls = [_checked_url(url, "http", "https", "ws", "wss").rstrip("/") for url in _several(value or "")]
        return ",".join(urls) or None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.energy_per_token is not None and self.energy.meter == "off":
            raise ValueError("an energy budget needs an energy.meter other than off")
        if self.web_search == STORE and self.cloud is None:
            raise ValueError("web_search store searches the cloud's documents: set cloud, or a SearXNG server's URL")
        plain = (url for url in map(urlsplit, self.clouds) if url.scheme in ("http", "ws"))
        if not self.insecure and not all(is_loopback(url.hostname or "") for url in plain):
            raise ValueError(f"the link to {self.cloud} would not be encrypted: use https URLs, or set insecure")
        return self

    @property
    def clouds(self) -> tuple[str, ...]:
        return tuple(_several(self.cloud or ""))


class StageSettings(ProgramSettings):
    """Settings of `paceline stage`: what it holds, where it listens, and how it proves itself."""

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
        None, repr=False, description="one-time code of `paceline devices add NAME --role stage`; - to be asked for it"
    )
    code_file: Path | None = Field(None, description="file whose first line is that code; -: standard input")
    engine_device: str = Field("auto", description="where it computes: cpu, cuda or cuda:1; auto: a GPU if any")
    dtype: NumberFormat = Field("auto", description="number format of the weights")
    kv_mib: int | None = Field(None, ge=1, description="MiB of its KV cache; default: as for serve")
    state_dir: Folder = Field(
        default_factory=lambda: state_home("device"),
        description="where its credential is kept; default: $XDG_STATE_HOME/paceline/device",
    )
    log_level: LogLevel = Field("info", description="least severity that is logged")
    log_format: Literal["text", "json"] = Field("text", description="of a line of the log; json: one object a line")
    credential: Literal["-"] | None = Field(
        None,
        description="-: read a credential from standard input, and end with it, as a stage that the server starts does",
    )
    tuning: StageTuning = Field({}, validate_default=True)

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
        first, colon, stop = (self.layers or "").partition(":")
        return (int(first), int(stop)) if colon else None

    @field_validator("server")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        return value and _checked_url(value, "http", "https")


SCHEMAS: tuple[type[NodeSettings], ...] = (ServerSettings, AgentSettings)
PROGRAMS: tuple[type[ProgramSettings], ...] = (*SCHEMAS, StageSettings)
