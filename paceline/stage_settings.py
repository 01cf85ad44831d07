"""Settings of `paceline stage`: flags, variables and a table of the file, as those of the other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from paceline.settings import ProgramSettings, state_home


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
