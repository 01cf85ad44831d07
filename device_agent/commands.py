"""The command `paceline agent`."""

from __future__ import annotations

import asyncio
import logging

import typer

from paceline.commands.options import options
from paceline.settings import AgentSettings, Origins, describe


def register(app: typer.Typer) -> None:
    example = "Example: paceline agent --cloud https://example.org --code -"
    app.command(epilog=example)(options(AgentSettings)(agent))


def agent(settings: AgentSettings, origins: Origins) -> None:
    """Serve this device's model and private documents, together with a cloud if one is given."""
    from paceline.api.http.server import configure_logging

    from .program import run  # torch is imported here, not for `paceline --help`

    configure_logging(settings.log_level)
    for line in describe(settings, origins):
        logging.getLogger("paceline.settings").info("%s", line)
    asyncio.run(run(settings))
