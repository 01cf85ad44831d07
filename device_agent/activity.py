"""`paceline devices activity`: what clients of the cloud have asked this device, from its log."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands.options import Config, Json, StateDir, show
from paceline.core.printable import printable
from paceline.core.side import MayAsk
from paceline.settings import AgentSettings
from paceline.settings_sources import resolve

if TYPE_CHECKING:
    from paceline.runtime.asking import Activity


def activity(
    last: Annotated[int, typer.Option("--last", "-n", min=1, max=40_000, help="the newest entries")] = 20,
    state_dir: StateDir = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show what clients of the cloud have asked this device, which documents were read, and what was sent.

    At the device, while the agent runs or not. Each line: when, the key's name as the cloud says it, the outcome,
    tokens of the answer, bytes sent, ids of the documents read (see `paceline docs list`), and the question.
    """
    from paceline.runtime.asking import FILE, ActivityLog, permission

    settings, _ = resolve(AgentSettings, {"state_dir": state_dir}, os.environ, config)
    entries: list[Activity] = []
    if (settings.state_dir / FILE).exists():  # reading creates nothing
        with closing(ActivityLog(settings.state_dir)) as log:
            entries = log.recent(last)
    none = ""
    if not entries:
        may_ask, origin = permission(settings)
        none = f"the cloud has asked nothing yet; it may ask: {may_ask} ({origin})"
    show(entries, *(printable("  ".join(_columns(entry))) for entry in entries), beside=none, as_json=as_json)


def _columns(entry: Activity) -> Iterator[str]:
    yield time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.began))
    yield entry.asker or "(no key)"
    yield (entry.outcome or "under way") + (f" x{entry.times}" if entry.times > 1 else "")
    if not entry.refused:
        yield f"{entry.tokens} tokens"
        yield f"{sum(entry.sent.values())} bytes"
        yield f"read {','.join(entry.documents) or 'nothing'}"
    yield entry.question


QUESTION = """
Clients of {cloud} may want answers that read this device's private documents. The documents stay here; such answers
go to the cloud, and whoever runs it can ask what it likes. Who may ask: off (nobody), on (everybody), or names of the
cloud's keys, separated by commas, which an honest cloud keeps to?"""


def ask_owner(settings: AgentSettings) -> None:
    """Ask at the first enrolment, if there is a terminal and no setting, and keep the answer. Otherwise nobody may."""
    if settings.cloud is None or settings.code is None or settings.cloud_may_ask is not None:
        return
    from paceline.runtime.asking import answered_for, keep_answer

    cloud = settings.clouds[0]
    if answered_for(settings.state_dir, cloud) is not None:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return  # `permission` then says so
    typer.echo(QUESTION.format(cloud=settings.cloud).strip(), err=True)
    while True:
        try:
            may_ask = MayAsk.parse(typer.prompt("cloud may ask", default="off", err=True))
            keep_answer(settings.state_dir, cloud, may_ask)
        except ValueError as error:
            typer.echo(f"The answer {error}.", err=True)
        else:
            return
