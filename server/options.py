"""Options that the commands at the server's state have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[Path | None, typer.Option("--state-dir", help="the server's state; default: as for serve")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file with settings; default: paceline.toml")]
Json = Annotated[bool, typer.Option("--json", help="write JSON to standard output")]
