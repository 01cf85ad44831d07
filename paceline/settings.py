"""One schema for flags, `PACELINE_*` variables and a TOML file, resolved once at start-up.

Precedence: flag > environment > file > default. An unknown key is an error that names the nearest known one.
The file (`paceline.toml` in the working directory, or `--config`) has keys that both programs read, and the tables
`[server]` and `[agent]` for one of them. A folder named for both programs (by a variable, or by a key outside the
tables) is split: each side uses its own subfolder, so that the two never share files.
`paceline.commands.options` makes the flags from the same fields.

pydantic-settings is not used: it neither reports where a value came from nor rejects an unknown variable. Knows nothing
of models, stores or the network: whether a model exists is checked by the engine.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import socket
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from paceline.core.permission import MayAsk
from paceline.core.side import Side
from paceline.errors import ConfigError
from paceline.side_folders import FOLDERS, own_folder

PREFIX = "PACELINE_"
DEFAULT_FILE = Path("paceline.toml")
SECRETS = frozenset({"api_keys", "code"})
DERIVED = frozenset({"state_dir", "docs_dir", "embedder", "device"})  # their default depends on the machine or a field

Origins = Mapping[str, str]  # field name -> where its value came from, in words


def state_home(side: Side) -> Path:
    """Default state directory of a side: $XDG_STATE_HOME/paceline/SIDE."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "paceline" / side


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the host. Names other than localhost are not looked up and give False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class NodeSettings(BaseModel):
    """Settings of both programs. Frozen; paths are absolute; relations between fields have been checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    table: ClassVar[str]  # this program's table in the file
    side: ClassVar[Side]

    model: str = Field("demo", description="demo, fake, a Hugging Face name, or a directory with safetensors")
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
    emulate: str | None = Field(
        None,
        description="emulated link: rtt=100ms,jitter=20ms,rate=10mbit,loss=0.01, and pace of the engine: "
        "forward=60ms,row=0.5ms; default: both as they are",
    )
    document_kv_mib: int = Field(
        2048,
        ge=0,
        description="MiB of disk at most for the KV of documents, kept so that each is computed once; 0: none is kept",
    )
    responses_mib: int = Field(
        256, ge=1, le=1 << 20, description="MiB of responses that are kept at most; the oldest go first"
    )
    responses_days: float = Field(30.0, gt=0, le=3650, description="days for which responses are kept")
    documents: int = Field(2, ge=0, le=64, description="passages each side reads per request, unless the request says")
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

    @field_validator("api_keys", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split lists at commas, as a variable holds several."""
        parts = [value] if isinstance(value, str) else value
        if isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts):
            return tuple(key.strip() for part in parts for key in part.split(",") if key.strip())
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            try:
                ipaddress.ip_network(each, strict=False)
            except ValueError:
                raise ValueError(f"{each[:80]!r} is not an address or a network such as 10.0.0.0/8") from None
        return value

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
    def _encrypted(self) -> Self:
        url = urlsplit(self.cloud or "")
        if self.cloud and url.scheme in ("http", "ws") and not is_loopback(url.hostname or "") and not self.insecure:
            raise ValueError(
                f"the link to {self.cloud} would not be encrypted: use an https URL, or set insecure if the network "
                "is your own"
            )
        return self


SCHEMAS: tuple[type[NodeSettings], ...] = (ServerSettings, AgentSettings)
Settings = TypeVar("Settings", bound=NodeSettings)


def resolve(
    cls: type[Settings], flags: Mapping[str, object], env: Mapping[str, str], file: Path | None = None
) -> tuple[Settings, Origins]:
    """Resolve the settings, and the origin of each field's value.

    `flags` may hold None for flags not given. `file` None: $PACELINE_CONFIG, else `paceline.toml` if there is one.
    Raises ConfigError with a sentence that names the key, its origin and what would be accepted.
    """
    if file is None and env.get(f"{PREFIX}CONFIG"):
        file = Path(env[f"{PREFIX}CONFIG"])
    values: dict[str, object] = {}
    origins = dict.fromkeys(cls.model_fields, "default")
    shared, own = _from_file(cls, file)
    for_both: dict[str, bool] = {}
    sources = ((shared, True), (own, False), (_from_env(cls, env), True), (_from_flags(cls, flags), False))
    for source, is_for_both in sources:  # later ones win
        for key, (value, origin) in source.items():
            values[key], origins[key], for_both[key] = value, origin, is_for_both
    for key in FOLDERS:
        if for_both.get(key):
            values[key] = own_folder(cls.side, key, values[key], origins[key])
    try:
        return cls.model_validate(values), origins
    except ValidationError as error:
        raise ConfigError(_sentence(error, origins)) from None


def describe(settings: NodeSettings, origins: Origins) -> list[str]:
    """One line per setting for the start of the log: name, value and origin, secrets masked."""
    width = max(len(key) for key in type(settings).model_fields)
    return [
        f"{key:<{width}} = {_shown(key, getattr(settings, key))}  ({origins[key]})"
        for key in type(settings).model_fields
    ]


def field_default(key: str, info: FieldInfo) -> str | None:
    """The default as `--help` shows it; None where the description names it."""
    if key in DERIVED or info.default in (None, (), False):
        return None
    return str(info.default)


def _shown(key: str, value: object) -> str:
    if key in SECRETS and value:
        return f"({len(value)} set)" if isinstance(value, tuple) else "(set)"
    if value is None or value == ():
        return "(none)"
    return str(value)


_Source = dict[str, tuple[object, str]]  # field -> (value, origin)


def _from_flags(cls: type[NodeSettings], flags: Mapping[str, object]) -> _Source:
    _refuse_unknown(flags, set(cls.model_fields), "flag")
    return {
        key: (value, f"flag --{key.replace('_', '-')}") for key, value in flags.items() if value not in (None, [], ())
    }


def _from_env(cls: type[NodeSettings], env: Mapping[str, str]) -> _Source:
    """Read variables; those of the other program are allowed, since both may share one environment. Empty: not set."""
    ours = {key.removeprefix(PREFIX).lower(): key for key in env if key.startswith(PREFIX)}
    ours.pop("config", None)
    _refuse_unknown(ours, _known(), "environment variable", spelt=lambda key: f"{PREFIX}{key.upper()}")
    return {
        key: (env[name], f"environment {name}") for key, name in ours.items() if key in cls.model_fields and env[name]
    }


def _from_file(cls: type[NodeSettings], file: Path | None) -> tuple[_Source, _Source]:
    """Read the file: (keys for both programs, keys of this program's table)."""
    path = file or DEFAULT_FILE
    if file is None and not path.is_file():
        return {}, {}
    try:
        with path.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None
    own: _Source = {}
    tables = {schema.table: content.pop(schema.table, {}) for schema in SCHEMAS}
    _refuse_unknown(content, _known() | set(tables), f"key in {path}")
    shared: _Source = {key: (value, f"file {path}") for key, value in content.items() if key in cls.model_fields}
    for schema in SCHEMAS:
        table = tables[schema.table]
        if not isinstance(table, dict):
            raise ConfigError(f"{schema.table} in {path} must be a table: [{schema.table}]")
        _refuse_unknown(table, set(schema.model_fields), f"key in [{schema.table}] of {path}")
        if schema is cls:
            own = {key: (value, f"file {path} [{schema.table}]") for key, value in table.items()}
    return shared, own


def _known() -> set[str]:
    return {key for schema in SCHEMAS for key in schema.model_fields}


def _refuse_unknown(
    keys: Iterable[str], known: set[str], what: str, spelt: Callable[[str], str] = lambda key: key
) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)  # 0: always name one
            raise ConfigError(f"unknown {what} {spelt(key)}: did you mean {spelt(near[0])}?")


def _sentence(error: ValidationError, origins: Origins) -> str:
    """Describe the first validation error that does not follow from another."""
    faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    fault = faults[0]
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    key = str(fault["loc"][0])
    shown = "(hidden)" if key in SECRETS else repr(fault["input"])
    return f"{key} = {shown} ({origins[key]}) cannot be used: {message[:1].lower()}{message[1:]}"
