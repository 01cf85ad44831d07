"""The commands `paceline chat`, `verify`, `mcp`, `status`, `demo`, `policy check`. httpx and rich: when they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from paceline.commands.groups import group_of
from paceline.core.printable import printable_json, printable_lines
from paceline.errors import ConfigError, PacelineError
from paceline.secret_files import given_secret

from .demo import demo
from .status import AsJson, Key, KeyFile, Url, check, status

if TYPE_CHECKING:
    from .conversation import Conversation

URL = "http://127.0.0.1:8000"
VERIFY_S = 600.0  # for an answer that is computed while others wait


def register(app: typer.Typer) -> None:
    app.command(epilog='Example: paceline chat "When does the museum open?"')(chat)
    app.command(epilog="Example: paceline verify resp_0123…")(verify)
    app.command(epilog="Example: paceline status --json")(status)
    app.command(epilog="Example: paceline demo --check")(demo)
    app.command(epilog="Example: paceline mcp --url http://127.0.0.1:8001")(mcp)
    told = "What the rules of [policy] make of a question, and documents that they ask their owner for."
    example = 'paceline policy check "What does my contract say?"'
    group_of(app, "policy", told, example).command(epilog=f"Example: {example}")(check)


def chat(
    question: Annotated[list[str] | None, typer.Argument(help="what to ask; without it, a conversation")] = None,
    url: Url = URL,
    key: Key = None,
    key_file: KeyFile = None,
    model: Annotated[str | None, typer.Option("--model", help="default: the first the server has")] = None,
    device: Annotated[str | None, typer.Option("--device", help="the device that joins, at a server")] = None,
    strategy: Annotated[str | None, typer.Option("--strategy", help="default: the server chooses")] = None,
    privacy: Annotated[
        str | None,
        typer.Option("--privacy", help="what may leave a device: open, document-private, answer-private, local-only"),
    ] = None,
    documents: Annotated[int | None, typer.Option("--documents", min=0, help="passages that each side reads")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="at most so many")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0, max=2, help="0: no chance")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="the same seed gives the same answer")] = None,
    history: Annotated[
        Path | None, typer.Option("--history", help="file that keeps your questions; default: none does")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask a question, or hold a conversation; shows which side's documents each word came from.

    In a conversation /help lists the commands. From a pipe each line is a question; the answers have no colours then,
    and failures go to standard error, with exit code 1 at the end.
    """
    from .conversation import Conversation
    from .dialogue import Screen

    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    asked = " ".join(question or []).strip()
    extension = {"device": device, "strategy": strategy, "privacy": privacy, "documents": documents}
    extension["timeline"] = None if asked else True  # for /how
    if as_json and not asked:
        raise ConfigError('--json needs a question: paceline chat --json "…"')
    key = given_secret("key", key, key_file)
    conversing = Conversation(url or URL, key=key, model=model, options=_given(options), extension=_given(extension))
    with conversing as conversation:
        if as_json:
            for _ in conversation.ask(asked):
                pass
            typer.echo(printable_json(json.dumps(conversation.answer.as_json(), indent=2, ensure_ascii=False)))
        elif asked:
            screen = Screen()
            screen.show(conversation.ask(asked))
            screen.show_sources(conversation.answer)
        else:
            _converse(conversation, history)


def verify(
    response: Annotated[str, typer.Argument(help="id of a stored answer of /v1/responses")],
    url: Url = URL,
    key: Key = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Have a stored answer computed again, and say which of its tokens are those that its strategy gives.

    Exit code 1 where a token differs, 2 where not all can be computed again.
    """
    from .conversation import Conversation

    with Conversation(url or URL, key=given_secret("key", key, key_file), silence=VERIFY_S) as conversation:
        found = conversation.post(f"/responses/{quote(response, safe='')}/verify", {})
    if as_json:
        typer.echo(printable_json(json.dumps(found, indent=2, ensure_ascii=False)))
    else:
        typer.echo("\n".join(printable_lines(line) for line in verdict(found)))
    if found.get("differing"):
        raise typer.Exit(1)
    if found.get("not_provable"):
        raise typer.Exit(2)


def verdict(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines about an answer that was computed again."""
    again = f", {found['asked_again']} of them asked of both sides once more" if found["asked_again"] else ""
    yield f"{found['proven']} of {found['tokens']} tokens proven{again}"
    if found["differing"]:
        yield f"{'index':>6}  {'told':24}  expected"
    for one in found["differing"]:
        told = "(the end)" if one["token"] is None else f"{one['token']} {one['text']!r}"
        yield f"{one['index']:>6}  {told:24}  {one['expected']} {one['expected_text']!r}"
    for one in found["not_provable"]:
        yield f"{one['tokens']} tokens cannot be proven: {one['reason']}"


def mcp(url: Url = URL, key: Key = None, key_file: KeyFile = None) -> None:
    """Offer a side's documents to another program as tools, over the Model Context Protocol on standard input.

    For programs that start such commands themselves; others are given URL/mcp. A key needs the scope `vector_stores`,
    or all, and cannot come from standard input. What is found goes to that program, and to the model that it asks.
    """
    from .conversation import Conversation

    version: dict[str, str] = {}  # of the protocol, once it has been agreed on
    with Conversation(url or URL, key=given_secret("key", key, key_file)) as conversation:
        for line in sys.stdin.buffer:
            try:
                answer = conversation.relay(line, version)
            except PacelineError as error:
                asked = _read(line).get("id")
                fault = {"code": -32000, "message": str(error)}
                answer = json.dumps({"jsonrpc": "2.0", "id": asked, "error": fault}).encode()
                if asked is None:  # a notification, which gets no answer
                    continue
            result = _read(answer).get("result")
            if isinstance(result, dict) and "protocolVersion" in result:
                version = {"mcp-protocol-version": str(result["protocolVersion"])}
            if answer:
                typer.echo(answer.strip())


def _read(message: bytes) -> dict[str, object]:
    try:
        found = json.loads(message)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _given(options: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _converse(conversation: Conversation, history: Path | None) -> None:
    """Answer questions until the input ends. A failed or interrupted answer does not end the conversation."""
    from .dialogue import HELP, Dialogue, PipedInput, Screen, Terminal

    screen = Screen()
    if sys.stdin.isatty():
        screen.say(f"{conversation.model} at {conversation.url}. /help lists commands, Ctrl-C stops an answer.")
        screen.show_legend()
        Dialogue(conversation, screen, Terminal(HELP, history), fail=screen.say).run()
        return
    failed: list[str] = []

    def fail(sentence: str) -> None:
        failed.append(sentence)
        typer.echo(f"paceline: {printable_lines(sentence)}", err=True)

    Dialogue(conversation, screen, PipedInput(), fail=fail).run()
    if failed:
        raise typer.Exit(1)
