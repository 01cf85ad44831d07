"""The commands `paceline agent`, `stage`, `setup`, `join` and `devices activity`.

What they run is imported when it runs: `--help` shows their options alone.
"""

from __future__ import annotations

import logging

import typer

from paceline.commands.options import Found, devices_group, doctor_checks, options
from paceline.settings import AgentSettings, NodeSettings, StageSettings
from paceline.settings_sources import Origins, describe_given

from .activity import activity
from .setup import join, setup
from .stage import EXAMPLE, stage


def register(app: typer.Typer) -> None:
    example = "Example: paceline agent --cloud https://example.org --code -"
    app.command(epilog=example)(options(AgentSettings)(agent))
    app.command(epilog=EXAMPLE)(options(StageSettings)(stage))
    app.command(epilog="Example: paceline setup --side device --model demo")(setup)
    app.command(epilog="Example: paceline join 'https://example.org#K7QF-2M9X-4TBA-9HJC'")(join)
    doctor_checks(app)["cloud link"] = _cloud_link
    devices_group(app).command(epilog="Example: paceline devices activity --last 50 --json")(activity)


def agent(settings: AgentSettings, origins: Origins) -> None:
    """Serve this device's model and private documents, together with a cloud if one is given."""
    import asyncio

    from paceline.api.http.logs import configure_logging

    from .activity import ask_owner
    from .program import run

    configure_logging(settings.log_level, settings.log_format)
    logging.getLogger("paceline.settings").info("%s", describe_given(settings, origins))
    ask_owner(settings)
    asyncio.run(run(settings))


def _cloud_link(settings: NodeSettings) -> Found | None:
    from .link_check import cloud_link

    return cloud_link(settings)
