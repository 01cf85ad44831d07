"""The question to a device's owner at enrolment: who among the cloud's clients may have it read private documents."""

from __future__ import annotations

import sys

import typer

from paceline.core.permission import MayAsk
from paceline.runtime.asking import EnrolmentAnswers
from paceline.settings import AgentSettings

QUESTION = """
Clients of {cloud} may want answers that read this device's private documents. The documents stay here; such answers
go to the cloud, and whoever runs it can ask what it likes. Who may ask: off (nobody), on (everybody), or names of the
cloud's keys, separated by commas, which an honest cloud keeps to?"""


def ask_owner(settings: AgentSettings) -> None:
    """Ask at the first enrolment, if there is a terminal and no setting, and keep the answer. Otherwise nobody may."""
    if settings.cloud is None or settings.code is None or settings.cloud_may_ask is not None:
        return
    answers = EnrolmentAnswers(settings.state_dir)
    if answers.get(settings.cloud) is not None:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return  # `permission` then says so
    typer.echo(QUESTION.format(cloud=settings.cloud).strip(), err=True)
    while True:
        try:
            answers.put(settings.cloud, MayAsk.parse(typer.prompt("cloud may ask", default="off", err=True)))
        except ValueError as error:
            typer.echo(f"The answer {error}.", err=True)
        else:
            return
