"""The command `paceline policy check`: what the rules of a running side make of a question."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paceline.core.printable import printable, printable_json
from paceline.secret_files import given_secret

from .status import AsJson, Key, KeyFile, Url

AGENT = "http://127.0.0.1:8001"


def check(
    question: Annotated[str, typer.Argument(help="what would be asked")],
    url: Url = AGENT,
    privacy: Annotated[
        str | None, typer.Option("--privacy", help="level that is asked for; default: the usual")
    ] = None,
    of_key: Annotated[
        str | None, typer.Option("--for", help="name of the key that would ask; default: this one")
    ] = None,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what would happen to a question, and why: documents, level, strategy, and what would leave.

    Nothing is sent to the other side.
    """
    from .conversation import Conversation

    body = {"question": question} | ({} if of_key is None else {"key": of_key})
    extension = {} if privacy is None else {"paceline": {"privacy": privacy}}
    with Conversation(url or AGENT, key=given_secret("key", key, key_file)) as conversation:
        found = conversation.post("/policy/check", {**body, **extension})
    if as_json:
        typer.echo(printable_json(json.dumps(found, indent=2, ensure_ascii=False)))
        return
    rule = found.get("rule")
    lines = [
        f"level     {found.get('level')}, {f'by the rule {rule}' if rule else 'as asked for'}",
        f"strategy  {found.get('strategy')}: {found.get('why')}",
        f"leaves    {found.get('leaves')}",
    ]
    documents, waiting, left = (found.get(name) for name in ("documents", "confirmation_needed", "budgets_left"))
    for each in documents if isinstance(documents, list) else ():
        lines.append(f"reads     {each.get('document')}{''.join(f', {told}' for told in each.get('rules', ()))}")
    for each in waiting if isinstance(waiting, list) else ():
        lines.append(f"waits     {each.get('document')}: paceline policy allow {each.get('id')}")
    lines += [f"left      {name} {amount:g}" for name, amount in left.items()] if isinstance(left, dict) else []
    typer.echo("\n".join(map(printable, lines)))
