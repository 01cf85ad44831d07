"""Options that commands of the client share, each with one spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[str | None, typer.Option("--url", help="a server or an agent, with or without /v1")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="the key, where one is needed; other users of the machine see it on a command line: give - to be "
        "asked for it or read it from the first line of standard input, or --key-file",
    ),
]
KeyFile = Annotated[Path | None, typer.Option("--key-file", help="file whose first line is the key; -: standard input")]
AsJson = Annotated[bool, typer.Option("--json", help="write JSON to standard output")]
