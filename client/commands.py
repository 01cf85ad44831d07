"""The command `paceline chat`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from paceline.core.printable import printable_json
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import given_secret

from .conversation import Conversation
from .screen import Screen

URL = "http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    app.command(epilog='Example: paceline chat "When does the museum open?"')(chat)


def chat(
    question: Annotated[list[str] | None, typer.Argument(help="what to ask; without it, a conversation")] = None,
    url: Annotated[str, typer.Option("--url", help="a server or an agent, with or without /v1")] = URL,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help="the key, where one is needed; other users of the machine see it on a command line: give - to be "
            "asked for it or read it from the first line of standard input, or --key-file",
        ),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="file whose first line is the key; -: standard input")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="default: the first the server has")] = None,
    device: Annotated[str | None, typer.Option("--device", help="the device that joins, at a server")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="default: the server chooses")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="at most so many")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=2, help="0: no chance")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="the same seed gives the same answer")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="write the whole answer as JSON when it is there")] = False,
) -> None:
    """Ask a question, or hold a conversation; shows which side's documents each word came from."""
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    extension = {"device": device, "strategy": strategy}
    asked = " ".join(question or []).strip()
    if as_json and not asked:
        raise ConfigError('--json needs a question: paceline chat --json "…"')
    key = given_secret("key", key, key_file)
    with Conversation(url, key=key, model=model, options=_given(options), extension=_given(extension)) as conversation:
        if as_json:
            for _ in conversation.ask(asked):
                pass
            typer.echo(printable_json(json.dumps(conversation.answer.as_json(), indent=2, ensure_ascii=False)))
        elif asked:
            _answer(conversation, asked, Screen())
        else:
            _converse(conversation, Screen())


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _converse(conversation: Conversation, screen: Screen) -> None:
    """Answer questions until the input ends. A failed or interrupted answer does not end the conversation."""
    screen.say(f"{conversation.model}. Ctrl-C stops an answer; an empty line, Ctrl-D or /quit ends.")
    while (asked := screen.question()) and asked.strip() != "/quit":
        try:
            _answer(conversation, asked, screen)
        except KeyboardInterrupt:
            screen.say("stopped")
        except PacelineError as error:
            screen.say(str(error))


def _answer(conversation: Conversation, asked: str, screen: Screen) -> None:
    screen.show(conversation.ask(asked))
    screen.show_sources(conversation.answer)
