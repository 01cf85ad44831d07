"""The commands `paceline agent` and `paceline devices activity`."""

from __future__ import annotations

import asyncio
import logging

import typer

from paceline.commands.groups import devices_group, doctor_checks
from paceline.commands.options import GroupedCommand, options
from paceline.settings import AgentSettings
from paceline.settings_sources import Origins, describe_given
from paceline.stage_settings import StageSettings

from .activity import activity
from .consent import ask_owner
from .link_check import cloud_link
from .stage import EXAMPLE, stage


def register(app: typer.Typer) -> None:
    example = "Example: paceline agent --cloud https://example.org --code -"
    app.command(epilog=example, cls=GroupedCommand)(options(AgentSettings)(agent))
    app.command(epilog=EXAMPLE, cls=GroupedCommand)(options(StageSettings)(stage))
    doctor_checks(app)["cloud link"] = cloud_link
    devices_group(app).command(epilog="Example: paceline devices activity --last 50 --json")(activity)


def agent(settings: AgentSettings, origins: Origins) -> None:
    """Serve this device's model and private documents, together with a cloud if one is given."""
    from paceline.api.http.logs import configure_logging

    from .program import run  # torch is imported here, not for `paceline --help`

    configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("paceline.settings").info("%s", describe_given(settings, origins))
    ask_owner(settings)
    asyncio.run(run(settings))
